"""One trainer of two: the example's loop undisturbed, then cut short, then resumed, in one go of torchrun.

`torchrun … ddp_thrice.py DATA NODE OUT STOP`: the losses of each go to OUT/RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from ddp import train


def main(data, node, out, stop):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folders = Path(out, "whole"), Path(out, "cut")
    for folder in folders:
        folder.mkdir(exist_ok=True)
    said = {"whole": train(data, folders[0], [node])}
    said["before"] = train(data, folders[1], [node], stop_after=int(stop))
    said["after"] = train(data, folders[1], [node])
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
