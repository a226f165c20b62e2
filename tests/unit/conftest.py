"""What the unit tests share: modules beside them, by name."""

import sys
from pathlib import Path

# Test files import what they share (`probe_logs`, `test_master`) by its name.
sys.path[:0] = [str(folder) for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir()]
