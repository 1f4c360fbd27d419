// In the place of CUDA's header of that name: all of CUDA that the kernels use.
#pragma once
#include "software_cuda.hpp"
#include "software_half.hpp"
