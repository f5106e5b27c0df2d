"""Masks that training chose, for bench_inference.py: a torchvision model trained from scratch for some hundred steps.

    python benchmarks/train_masks.py --model vit_b_16 --block 32 --data cifar10.npz --out vit32.safetensors
    python benchmarks/bench_inference.py --load vit32.safetensors --images cifar10.npz

The images are those of CIFAR-10, enlarged to 224×224: enough for masks that follow gradients, and for outputs that differ
from image to image. The accuracy, printed at the end, is that of so short a run, and no measure of the method.
"""

from __future__ import annotations

import argparse

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

import spartan
from spartan.zoo import torchvision


def enlarged(images: Tensor, device: torch.device) -> Tensor:
    """uint8 [n, 32, 32, 3] as normalised float32 [n, 3, 224, 224]."""
    x = images.to(device).permute(0, 3, 1, 2).float() / 255
    return F.interpolate((x - 0.473) / 0.251, size=224, mode="bilinear")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b_16", help="of torchvision")
    parser.add_argument("--block", type=int, default=1, help="side of the blocks; 1 is single weights")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--data", required=True, help="an .npz with x_train and y_train, as get_cifar10.py writes it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arrays = numpy.load(args.data)
    images, labels = torch.from_numpy(arrays["x_train"]), torch.from_numpy(arrays["y_train"]).long()
    model = getattr(torchvision().models, args.model)().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.1)
    pattern = spartan.Block(args.block, args.block) if args.block > 1 else None
    # A vision transformer's patches and head stay dense, as in the random cases.
    exclude = ("conv_proj*", "heads*") if args.model.startswith("vit") else None
    sparsifier = spartan.Sparsifier(
        model, args.sparsity, args.steps, spartan.Spartan(), pattern=pattern, budget="uniform", exclude=exclude
    ).attach(optimizer)
    right = torch.zeros((), device=device)
    for step in range(args.steps):
        chosen = torch.randint(len(images), (args.batch,))
        x, y = enlarged(images[chosen], device), labels[chosen].to(device)
        with torch.autocast(device.type, torch.bfloat16):
            out = model(x)
        F.cross_entropy(out.float(), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step >= args.steps - 20:
            right += (out.argmax(1) == y).float().mean()
    sparsifier.finalize()
    size = spartan.save(model.eval(), args.out, torch.bfloat16, architecture=f"torchvision/{args.model}")
    last = min(20, args.steps)
    print(f"{args.out}: {size:,} bytes, {100 * float(right) / last:.1f}% of the last {last} batches right")


if __name__ == "__main__":
    main()
