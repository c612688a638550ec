"""Imported by tflops.py where it runs as a script (`python analysis/tflops.py`), before all else.

Python then looks for modules in analysis/ first. From here on it looks in the repository's root,
where the rooms are, so that no file of analysis/ hides one of Python's own modules.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)
