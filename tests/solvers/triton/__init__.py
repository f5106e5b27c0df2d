"""The kernels against plain torch: on the GPU where there is one, else through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
