"""What is uploaded comes back as it was."""

import numpy as np
import torch

from engine.runner.upload import upload


def test_arrays_of_any_kind_and_shape_lie_side_by_side() -> None:
    arrays = {
        "bytes": np.arange(21, dtype=np.uint8).reshape(3, 7),
        "nothing": np.empty((0, 4), np.int32),
        "doubles": np.linspace(0, 1, 10)[::2].reshape(5, 1),
        "ids": np.array([-1, 5], np.int32),
    }
    tensors = upload(arrays, torch.device("cpu"))
    for name, array in arrays.items():
        assert tensors[name].numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensors[name].numpy(), array)
        assert tensors[name].data_ptr() % 16 == tensors["bytes"].data_ptr() % 16 or not array.size
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors.values()}) == 1


def test_nothing_is_no_trouble() -> None:
    assert upload({}, torch.device("cpu")) == {}
