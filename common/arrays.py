"""A type for numpy arrays of any kind."""

from typing import Any

import numpy as np

# The docstring where it is used says what the numbers are: float64, bool and so on.
Array = np.ndarray[Any, np.dtype[Any]]
