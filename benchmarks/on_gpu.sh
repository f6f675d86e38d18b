#!/usr/bin/env bash
# What has to be seen on a GPU: the tests of the kernel, which run there instead of in the interpreter, the memory that
# the kernel touches, and the laws of the dynamics through every optimizer that is installed. It needs
# pip install -e '.[finetune,dev,peers]'. Everything goes to DIRECTORY/on-gpu.log as well.
#
#   benchmarks/on_gpu.sh [DIRECTORY]
set -uo pipefail
export PYTHONWARNINGS=ignore
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/on-gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
{
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    $python -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
    echo "== tests"
    $python -m pytest -n "$(($(nproc) / 2))" -p no:cacheprovider -p no:benchmark -o addopts= --no-header --disable-warnings \
        tests/test_parity.py tests/test_kernel.py tests/test_gpu.py tests/test_peak.py && echo "tests passed"
    tests=$?
    echo "== memory, under compute-sanitizer"
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        $python -m pytest -p no:cacheprovider tests/test_kernel.py -k "equal_to_eager"
    memory=$?
    echo "== laws"
    $python benchmarks/laws.py --device cuda --jobs "$(nproc)" --json "$out/laws.json"
    laws=$?
    echo "== tests exit code $tests, memory exit code $memory, laws exit code $laws"
} 2>&1 | tee "$out/on-gpu.log"
! grep -q "exit code [1-9]" "$out/on-gpu.log"
