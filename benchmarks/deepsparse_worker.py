"""Runs an ONNX file by DeepSparse whenever its standard input has a line, for `bench_inference.py --deepsparse PYTHON`.

    python deepsparse_worker.py MODEL.onnx INPUTS.npy OUTPUTS.npy THREADS

DeepSparse 1.8.0, the last version, wants older packages than ours, and so a Python environment of its own:
`pip install deepsparse==1.8.0 'onnx<1.16' 'numpy<2'`.
Each line is answered with the seconds of one call.
"""

import sys
import time

import numpy
from deepsparse import compile_model  # type: ignore[import-not-found]


def main() -> None:
    model, inputs, outputs, threads = sys.argv[1:]
    x = numpy.ascontiguousarray(numpy.load(inputs))
    engine = compile_model(model, batch_size=len(x), num_cores=int(threads))
    numpy.save(outputs, engine.run([x])[0])
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        engine.run([x])
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
