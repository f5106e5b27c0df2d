"""What happens around `optimizer.step()`: θ goes into the model and is updated, masks are solved anew, w goes back."""
