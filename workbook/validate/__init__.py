"""How predictions are judged: cases, goals, rival models, labs, clusters of others; and planners."""
