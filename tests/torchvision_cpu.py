"""`torchvision`, also beside a CPU build of torch."""

from spartan import zoo

torchvision = zoo.torchvision()
