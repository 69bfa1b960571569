"""The parts of the comparison with other engines on a processor: files, children, cases, figures,
and one runner each."""
