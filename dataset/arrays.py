"""Types of NumPy arrays."""

from typing import Any

import numpy as np

# integers of any width, in any shape
Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
