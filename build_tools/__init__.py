"""Build machinery: used by setup.py, the Makefile and CI; not part of the installed package."""
