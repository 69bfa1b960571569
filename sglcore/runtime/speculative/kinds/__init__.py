"""How the drafts of each kind run, one file for a kind or for kinds that run alike."""
