"""Types for numpy arrays."""

from typing import Any

import numpy as np

# The docstring where it is used says what the numbers are: float64, bool and so on.
Array = np.ndarray[Any, np.dtype[Any]]
# Whole numbers, of any width
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
