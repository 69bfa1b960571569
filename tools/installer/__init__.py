"""Installs sglcore from this checkout: chooses torch, makes the pip commands and explains failures.
Standard library only.

Importing it ends the process with one line if the interpreter is not supported, before any module
with newer syntax is read.
"""

import sys

from tools.installer.pythons import refusal

if said := refusal(sys.version_info[:3], sys.executable):
    sys.exit(said)
