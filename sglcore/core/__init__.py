"""What every part uses: errors, and the ledger of decisions. It imports no other part."""
