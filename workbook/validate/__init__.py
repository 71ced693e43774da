"""How predictions and planners are judged, with goals, rival models, labs and clusters."""
