"""The conformance kit for device packages: laws by level, the mutants that each law must catch, and
known gaps as data.

Begin with `law.py` (what a law is), then `catalogue.py` (all of them). The kit drives any
`ModelWorker`; laws that look inside a torch device say so in what they need. pytest is needed by
`plugin.py` and `suite.py` only.
"""
