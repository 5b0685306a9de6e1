// All operations of one instruction set. Compiled once for each, with its flags and MEGATRON_VARIANT set to its name.
//
// Everything is in the variant's own namespace: an inline function outside it would be merged with that of another
// variant, and a CPU could execute instructions that it lacks. For the same reason no standard template is used here.

#include "operations.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define MEGATRON_STRING_OF(name) #name
#define MEGATRON_STRING(name) MEGATRON_STRING_OF(name)

namespace megatron::MEGATRON_VARIANT {

namespace {

#include "numbers.h"

#if defined(MEGATRON_PORTABLE)
#include "simd_portable.h"

#include "integers_portable.h"
#elif defined(__AVX512F__)
#include "simd_avx512.h"

#include "integers_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"

#include "integers_avx2.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"

#include "integers_neon.h"
#endif

#include "rows.h"

#include "matmul.h"

#include "packing.h"

#include "unpack.h"

#include "attention.h"

}  // namespace

extern const Operations OPERATIONS = {
    MEGATRON_STRING(MEGATRON_VARIANT),
    pack,
    matrix_bytes,
    activation_format,
    activation_bytes,
    activation_offset,
    prepare,
    multiply,
    unpack_row,
    normalize,
    rms_norm,
    add,
    scale,
    add_scaled,
    dot,
    gate,
    rotate,
    write_cache,
    attend,
    merge,
    finish,
};

}  // namespace megatron::MEGATRON_VARIANT
