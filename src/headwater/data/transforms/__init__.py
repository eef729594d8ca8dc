"""Transforms as data: what is done to a picture between its bytes and the model's input.

Owns the table of steps. A new step takes one file that defines it and one line here. Nothing below imports torch.
"""

from headwater.data.transforms.centercrop import CenterCrop as CenterCrop
from headwater.data.transforms.colorjitter import ColorJitter as ColorJitter
from headwater.data.transforms.decodestep import Decode as Decode
from headwater.data.transforms.grayscale import Grayscale as Grayscale
from headwater.data.transforms.horizontalflip import HorizontalFlip as HorizontalFlip
from headwater.data.transforms.normalize import Normalize as Normalize
from headwater.data.transforms.op import Op
from headwater.data.transforms.pad import Pad as Pad
from headwater.data.transforms.randomcrop import RandomCrop as RandomCrop
from headwater.data.transforms.randomresizedcrop import RandomResizedCrop as RandomResizedCrop
from headwater.data.transforms.resize import Resize as Resize
from headwater.data.transforms.tofloat import ToFloat as ToFloat
from headwater.data.transforms.tokenize import Tokenize as Tokenize
from headwater.data.transforms.verticalflip import VerticalFlip as VerticalFlip

OPS: dict[str, type[Op]] = {
    name: op for name, op in list(globals().items()) if isinstance(op, type) and issubclass(op, Op) and op is not Op
}

from headwater.data.transforms.chain import Transforms as Transforms  # noqa: E402  (it reads the table above)
