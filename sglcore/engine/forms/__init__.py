"""Forms in which ranks may hold a model, and what each would cost: numbers in, numbers out."""
