// Replaces CUDA's header of this name, and has everything of CUDA that the kernels use.
#pragma once
#include "software_cuda.hpp"
#include "software_half.hpp"
