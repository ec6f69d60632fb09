"""What happens to gradients and weights: finish, schedule, EMA."""
