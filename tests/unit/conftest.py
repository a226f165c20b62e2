"""What the unit tests share: modules beside them, by name."""

import sys
from pathlib import Path

# Test files import `probe_logs` by its name.
sys.path.insert(0, str(Path(__file__).parent))
