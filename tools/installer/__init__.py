"""What installs sglcore from this checkout: which torch, which pip commands, and what went wrong in
words. Standard library only.

Importing it ends the process with one line where the interpreter is not one that is served, before
anything newer is read.
"""

import sys

from tools.installer.pythons import refusal

if said := refusal(sys.version_info[:3], sys.executable):
    sys.exit(said)
