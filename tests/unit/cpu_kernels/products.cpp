// Checks every weight format in the instruction sets that the arguments name, whether or not the CPU reports them.
//
// Prints one line for each: the hash of the panels, which is the same on every machine, and the hash of the results, which
// is the same for one instruction set. Exits with 1 after a wrong result.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "operations.h"

using namespace megatron;

extern "C" {
int64_t megatron_runs(const char* name);
void megatron_select(const char* name);
void* megatron_create_pool(int64_t threads);
void megatron_destroy_pool(void* pool);
int64_t megatron_multiply(void* pool, const Matrix* matrix, const float* x, int64_t rows, float* y);
void megatron_look_up(const Matrix* matrix, const int64_t* ids, int64_t count, float* x);
int64_t megatron_matrix_bytes(const Matrix* matrix);
void megatron_pack(const Packing* packing, int64_t first, int64_t end);
}

namespace {

constexpr int64_t OUTPUTS = 80, INPUTS = 512, ROWS = 37;
// Rows from which AMX unpacks integers to bfloat16: MIN_UNPACKED_ROWS of matmul_unpacked.h.
constexpr int64_t UNPACKED_ROWS = 24;

// A source of rows, numbered as in GGML, and the bytes of 256 values.
struct Case {
  const char* name;
  Format format;
  int64_t source;
  int64_t bytes;
  std::vector<int64_t> halves;  // offsets of the scales in a block of `block_bytes`
  int64_t block_bytes;
};

const Case CASES[] = {
    {"float32", FLOAT32, 0, 1024, {}, 4}, {"bfloat16", BFLOAT16, 0, 1024, {}, 4}, {"float16", FLOAT16, 0, 1024, {}, 4},
    {"int8", INT8, 0, 1024, {}, 4},       {"int4", INT4, 0, 1024, {}, 4},         {"q4_0", INT4, 2, 144, {0}, 18},
    {"q4_1", INT4, 3, 160, {0, 2}, 20},   {"q5_0", INT5, 6, 176, {0}, 22},        {"q5_1", INT5, 7, 192, {0, 2}, 24},
    {"q8_0", INT8, 8, 272, {0}, 34},      {"q2_k", Q2_K, 10, 84, {80, 82}, 84},   {"q3_k", Q3_K, 11, 110, {108}, 110},
    {"q4_k", Q4_K, 12, 144, {0, 2}, 144},
    {"q5_k", Q5_K, 13, 176, {0, 2}, 176}, {"q6_k", Q6_K, 14, 210, {208}, 210},
};

struct Random {
  uint64_t state = 1;
  uint32_t next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  }
};

uint64_t hash(const void* data, size_t size) {
  uint64_t result = 14695981039346656037u;
  for (size_t i = 0; i < size; ++i) result = (result ^ static_cast<const uint8_t*>(data)[i]) * 1099511628211u;
  return result;
}

std::vector<uint8_t> rows_of(const Case& test) {
  Random random;
  std::vector<uint8_t> rows(static_cast<size_t>(OUTPUTS * INPUTS / 256 * test.bytes));
  for (auto& byte : rows) byte = static_cast<uint8_t>(random.next());
  if (test.source == 0) {
    for (size_t i = 0; i < rows.size(); i += 4) {
      const float value = static_cast<float>(random.next() % 2001) * 1e-3f - 1.0f;
      std::memcpy(&rows[i], &value, 4);
    }
  }
  for (size_t block = 0; block < rows.size(); block += static_cast<size_t>(test.block_bytes)) {
    for (const int64_t half : test.halves) {
      const uint16_t scale = static_cast<uint16_t>(0x2000 + random.next() % 0x800);  // 2^-7 … 2^-5
      std::memcpy(&rows[block + static_cast<size_t>(half)], &scale, 2);
    }
  }
  return rows;
}

float rounded_to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFFu + (bits >> 16 & 1u)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Whether y[ROWS][OUTPUTS] is x · weights.
bool is_product(const std::vector<float>& x, const std::vector<float>& weights, const std::vector<float>& y) {
  double greatest = 0.0, worst = 0.0;
  for (int64_t row = 0; row < ROWS; ++row) {
    for (int64_t output = 0; output < OUTPUTS; ++output) {
      double expected = 0.0;
      for (int64_t k = 0; k < INPUTS; ++k) {
        expected += static_cast<double>(x[row * INPUTS + k]) * static_cast<double>(weights[output * INPUTS + k]);
      }
      greatest = std::fmax(greatest, std::fabs(expected));
      worst = std::fmax(worst, std::fabs(expected - static_cast<double>(y[row * OUTPUTS + output])));
    }
  }
  return worst <= 1e-5 * greatest;
}

bool is_right(const char* isa, const Case& test, void* pool) {
  const std::vector<uint8_t> rows = rows_of(test);
  Matrix matrix{test.format, INPUTS, OUTPUTS, nullptr};
  std::vector<uint8_t> panels(static_cast<size_t>(megatron_matrix_bytes(&matrix)));
  matrix.panels = panels.data();
  const Packing packing{test.source, rows.data(), INPUTS / 256 * test.bytes, matrix, panels.data()};
  megatron_pack(&packing, 0, OUTPUTS / PANEL);

  // Sixty-fourths whose greatest is 127 in each 32: exact in bfloat16 and in int8.
  Random random;
  std::vector<float> x(ROWS * INPUTS), weights(OUTPUTS * INPUTS), alone(ROWS * OUTPUTS);
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i % 32 == 0 ? 127 : static_cast<int>(random.next() % 255) - 127) / 64.0f;
  }
  std::vector<int64_t> ids(OUTPUTS);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i);
  megatron_look_up(&matrix, ids.data(), OUTPUTS, weights.data());
  for (int64_t row = 0; row < ROWS; ++row) {
    megatron_multiply(pool, &matrix, x.data() + row * INPUTS, 1, alone.data() + row * OUTPUTS);
  }
  bool right = true;
  if (!is_product(x, weights, alone)) {
    std::fprintf(stderr, "%s %s: a row alone is wrong\n", isa, test.name);
    right = false;
  }
  std::vector<float> together(ROWS * OUTPUTS);
  megatron_multiply(pool, &matrix, x.data(), ROWS, together.data());
  const bool unpacks = std::strcmp(isa, "amx") == 0 && test.format >= INT8;
  if (unpacks) {
    for (float& weight : weights) weight = rounded_to_bfloat16(weight);
  }
  if (!is_product(x, weights, together)) {
    std::fprintf(stderr, "%s %s: rows together are wrong\n", isa, test.name);
    right = false;
  }
  for (int64_t count = 2; count <= ROWS; ++count) {
    const std::vector<float>& expected = unpacks && count >= UNPACKED_ROWS ? together : alone;
    std::vector<float> y(static_cast<size_t>(count * OUTPUTS));
    megatron_multiply(pool, &matrix, x.data(), count, y.data());
    if (std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) != 0) {
      std::fprintf(stderr, "%s %s: a row differs in a batch of %d\n", isa, test.name, static_cast<int>(count));
      right = false;
    }
  }
  std::printf("%s %s %016llx %016llx\n", isa, test.name, static_cast<unsigned long long>(hash(panels.data(), panels.size())),
              static_cast<unsigned long long>(hash(alone.data(), alone.size() * sizeof(float))));
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  bool right = true;
  for (int i = 1; i < argc; ++i) {
    megatron_runs(argv[i]);  // also requests the tiles of AMX from Linux
    megatron_select(argv[i]);
    void* pool = megatron_create_pool(2);
    for (const Case& test : CASES) right = is_right(argv[i], test, pool) && right;
    megatron_destroy_pool(pool);
  }
  return right ? 0 : 1;
}
