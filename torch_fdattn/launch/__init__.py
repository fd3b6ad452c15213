"""All that is between an op and a kernel.

    launches.py       `Launch`: a kernel, its grid and its arguments; `run` and `launch` make them
    prepared.py       `PreparedCall`: the launches of calls of equal metadata, bound once; the one cache of them
    driver_launch.py  a compiled kernel through the driver's own call, its arguments laid out once
    device.py         the tensors' device made current
    tile_counter.py   counters from which persistent kernels take their tiles, one a stream
    driver.py         the CUDA driver by ctypes
    tensor_map.py     what stands for descriptors (TMA)
    pdl.py            programmatic dependent launch: kernels that start before the one before has ended

An op's launcher returns `Launch`es. The first two calls of a kind go through Triton, which compiles; then the driver is
handed the tensors' addresses, and the other arguments as they lie. `prepared.py` and `device.py` import no triton.
"""
