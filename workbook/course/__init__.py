"""What notebooks use: parameters and exercises."""
