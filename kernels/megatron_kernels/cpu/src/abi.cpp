// The functions of the C ABI, apart from the selection of the instruction set (dispatch.cpp).

#include <exception>

#include "decoder.h"

using namespace megatron;

namespace {

// A function's result, or null or -1 if memory or threads ran out.
template <typename Run, typename Result>
Result guarded(Run run, Result failure) noexcept {
  try {
    return run();
  } catch (const std::exception&) {
    return failure;
  }
}

}  // namespace

MEGATRON_EXPORT ThreadPool* megatron_create_pool(int64_t threads) {
  return guarded([&] { return new ThreadPool(threads); }, static_cast<ThreadPool*>(nullptr));
}

MEGATRON_EXPORT void megatron_destroy_pool(ThreadPool* pool) { delete pool; }

MEGATRON_EXPORT Decoder* megatron_create_decoder(const Model* model) {
  return guarded([&] { return new Decoder(*model); }, static_cast<Decoder*>(nullptr));
}

MEGATRON_EXPORT void megatron_destroy_decoder(Decoder* decoder) { delete decoder; }

// Run phases first … end - 1 of a step; see Decoder::run(). Returns 0, or -1 if memory ran out.
MEGATRON_EXPORT int64_t megatron_run(Decoder* decoder, ThreadPool* pool, const Step* step, int64_t first, int64_t end) {
  return guarded([&]() -> int64_t { return decoder->run(*pool, *step, first, end), 0; }, int64_t{-1});
}

// See Decoder::add_sums().
MEGATRON_EXPORT void megatron_add_sums(Decoder* decoder, ThreadPool* pool, const Step* step, int64_t phase) {
  decoder->add_sums(*pool, *step, phase);
}

// See Operations.
MEGATRON_EXPORT void megatron_pack(const Packing* packing, int64_t first, int64_t end) {
  operations().pack(*packing, first, end);
}

MEGATRON_EXPORT int64_t megatron_matrix_bytes(const Matrix* matrix) { return operations().matrix_bytes(*matrix); }

// y[rows][outputs] = x[rows][inputs] · matrix. Returns 0, or -1 if memory ran out.
MEGATRON_EXPORT int64_t megatron_multiply(ThreadPool* pool, const Matrix* matrix, const float* x, int64_t rows, float* y) {
  constexpr int64_t PANELS_OF_PART = 4;
  return guarded(
      [&]() -> int64_t {
        const Operations& use = operations();
        const int64_t format = use.activation_format(*matrix, rows), bytes = use.activation_bytes(format, matrix->inputs);
        const int64_t panels = matrix->outputs / PANEL;
        Buffer<uint8_t> buffer;
        uint8_t* prepared = buffer.reserve(rows * bytes);
        pool->run([&](Worker& worker) {
          worker.share(rows, [&](int64_t row) {
            use.prepare(format, x + row * matrix->inputs, matrix->inputs, 1, matrix->inputs, prepared + row * bytes);
          });
          worker.share((panels + PANELS_OF_PART - 1) / PANELS_OF_PART, [&](int64_t part) {
            const int64_t first = part * PANELS_OF_PART, end = first + PANELS_OF_PART < panels ? first + PANELS_OF_PART : panels;
            use.multiply(*matrix, first, end, format, prepared, rows, y + first * PANEL, matrix->outputs, false);
          });
        });
        return 0;
      },
      int64_t{-1});
}

// x[count][inputs] = rows ids[0 … count - 1] of a matrix, as they were rounded.
MEGATRON_EXPORT void megatron_look_up(const Matrix* matrix, const int64_t* ids, int64_t count, float* x) {
  for (int64_t i = 0; i < count; ++i) operations().unpack_row(*matrix, ids[i], x + i * matrix->inputs);
}

// The sum of `words` words of eight bytes, modulo 2^64.
MEGATRON_EXPORT uint64_t megatron_sum(const uint8_t* data, int64_t words) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;  // a view of a file may begin at any address
    __builtin_memcpy(&word, data + 8 * i, sizeof word);
    sum += word;
  }
  return sum;
}

// The sum of words of eight bytes. Returns whether no number in them has all bits of its exponent set.
// exponents: the bits of all exponents in a word; a sign precedes each of them.
MEGATRON_EXPORT int64_t megatron_sum_of_values(const uint8_t* data, int64_t words, uint64_t exponents, uint64_t* total) {
  const uint64_t lowest = exponents & ~(exponents << 1), signs = exponents + lowest;
  uint64_t sum = 0, found = 0;
  for (int64_t i = 0; i < words; ++i) {
    uint64_t word;
    __builtin_memcpy(&word, data + 8 * i, sizeof word);
    sum += word;
    found |= (word & exponents) + lowest;
  }
  *total = sum;
  return (found & signs) == 0;
}

// Whether none of `halves` float16 numbers at the beginning of each block has all bits of its exponent set.
MEGATRON_EXPORT int64_t megatron_scales_are_finite(const uint8_t* data, int64_t blocks, int64_t block_bytes, int64_t halves) {
  constexpr uint32_t exponent = 0x7C00, lowest = 0x0400, sign = 0x8000;
  uint32_t found = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    for (int64_t half = 0; half < halves; ++half) {
      uint16_t bits;
      __builtin_memcpy(&bits, data + block * block_bytes + 2 * half, sizeof bits);
      found |= (bits & exponent) + lowest;
    }
  }
  return (found & sign) == 0;
}
