"""What every process of the tests has. It is set before torch is imported, and programs that a test starts have it too."""

import os

# The matrices of the tests are tiny: threads would mostly wait for each other, and for those of the tests beside them.
os.environ["OMP_NUM_THREADS"] = "1"
