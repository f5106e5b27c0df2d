"""`torchvision`, also beside a CPU build of torch."""

from spartan.app.train import vision

torchvision = vision.torchvision()
