"""What hashes of 64 bits are mixed with."""

import numpy as np

# An odd number whose bits look random (the golden ratio as a fraction of 2^64), and shifts that bring high bits down.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)
