"""`torchvision`, also beside a CPU build of torch."""

from spartan.training import vision

torchvision = vision.torchvision()
