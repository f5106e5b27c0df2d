"""What is asked: targets, their units and costs, who competes with whom, and how that changes over a run."""
