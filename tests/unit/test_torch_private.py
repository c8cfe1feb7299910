"""What torch keeps to itself still says what it said."""

import sys

import torch

from phonograph import torch_private


def test_inductors_code_says_what_it_writes():
    path, called = torch_private.COMPILED_GRAPH
    found = []

    def hear(frame, event, _):
        if event == "call" and frame.f_code.co_name == called and frame.f_code.co_filename.endswith(path):
            found.append(torch_private.written_by_graph(frame))

    @torch.compile
    def function(written, read):
        written.add_(read)
        return written * 2

    written, read = torch.zeros(4), torch.ones(4)
    try:
        function(written, read)
        sys.setprofile(hear)
        function(written, read)
    finally:
        sys.setprofile(None)
        torch._dynamo.reset()
    ((only,),) = found
    assert only.data_ptr() == written.data_ptr()
