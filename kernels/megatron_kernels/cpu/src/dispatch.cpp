// Selection of the instruction set, once per process.

#include <cstdlib>
#include <cstring>

#include "operations.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace megatron {

namespace {

#if defined(__x86_64__)

// Linux grants the registers of AMX tiles on request.
bool request_tiles() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

bool runs(const char* variant) {
  const auto is = [variant](const char* name) { return std::strcmp(variant, name) == 0; };
  if (is("portable")) return true;
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (is("avx2")) return avx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (is("avx512")) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (is("avx512_vnni")) return vnni;
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  if (is("avx512_bf16")) return bf16;
  return bf16 && __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && request_tiles();
}

#elif defined(__aarch64__)

bool runs(const char* variant) {
  const auto is = [variant](const char* name) { return std::strcmp(variant, name) == 0; };
  if (is("portable") || is("neon")) return true;
  const bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  if (is("neon_dotprod")) return dotprod;
  constexpr unsigned long NEEDED = HWCAP2_I8MM | HWCAP2_BF16;
  return dotprod && (getauxval(AT_HWCAP2) & NEEDED) == NEEDED;
}

#else

bool runs(const char*) { return true; }

#endif

#define MEGATRON_TABLE(variant) &variant::OPERATIONS,
const Operations* const TABLES[] = {MEGATRON_VARIANTS(MEGATRON_TABLE)};
#undef MEGATRON_TABLE

const Operations* selected = nullptr;

}  // namespace

const Operations& operations() { return *selected; }

}  // namespace megatron

using namespace megatron;

// The instruction sets of this library, best first; null at the end and beyond.
MEGATRON_EXPORT const char* megatron_instruction_set(int64_t number) {
  return number < static_cast<int64_t>(sizeof TABLES / sizeof *TABLES) ? TABLES[number]->name : nullptr;
}

// Whether this CPU has it.
MEGATRON_EXPORT int64_t megatron_runs(const char* name) { return runs(name); }

// Use an instruction set that this CPU has, before any other call.
MEGATRON_EXPORT void megatron_select(const char* name) {
  for (const Operations* table : TABLES) {
    if (std::strcmp(table->name, name) == 0) selected = table;
  }
}
