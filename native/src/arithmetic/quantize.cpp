// Quantisation, block by block: what is decided per block is decided here, once for all CPU levels; the loops over
// elements are the level's.

#include "ringfold/quantize.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "cpu.hpp"

namespace ringfold::quantize {

namespace {

using kernels::DType;
using kernels::ReduceOp;

constexpr size_t head_bytes = 8;
constexpr uint32_t special_from_bits = (127u + 126u) << 23;  // of 2^126: twice it is finite still
constexpr float smallest_step = 0x1p-126f;

struct Head {
  float step;
  union {
    float base;
    int32_t zero;
  };
};
static_assert(sizeof(Head) == head_bytes);

bool is_narrow(Scheme scheme) { return scheme == Scheme::minmax4 || scheme == Scheme::zeroscale4; }
bool has_zero(Scheme scheme) { return scheme == Scheme::zeroscale8 || scheme == Scheme::zeroscale4; }
int32_t top_code(Scheme scheme) { return is_narrow(scheme) ? 15 : 255; }
size_t index(Scheme scheme) { return static_cast<size_t>(scheme) - 1; }
size_t code_bytes(Scheme scheme, size_t count) { return is_narrow(scheme) ? (count + 1) / 2 : count; }

// While this lives, the FPU rounds to nearest even and keeps subnormals, whatever the program has set.
class PlainFloats {
 public:
#if defined(__SSE2__)
  PlainFloats() : before_(_mm_getcsr()) {
    if ((before_ & changed) != 0) _mm_setcsr(before_ & ~changed);
  }
  ~PlainFloats() {
    if ((before_ & changed) != 0) _mm_setcsr(before_);
  }

 private:
  static constexpr unsigned changed = 0xe040;  // flush to zero, rounding mode, subnormals are zero
  unsigned before_;
#elif defined(__aarch64__)
  PlainFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    if ((before_ & changed) != 0) asm volatile("msr fpcr, %0" : : "r"(before_ & ~changed));
  }
  ~PlainFloats() {
    if ((before_ & changed) != 0) asm volatile("msr fpcr, %0" : : "r"(before_));
  }

 private:
  static constexpr uint64_t changed = 0x1c80000;  // flush to zero, rounding mode, and the same for f16
  uint64_t before_;
#else
  PlainFloats() {}
#endif
  PlainFloats(const PlainFloats&) = delete;
  PlainFloats& operator=(const PlainFloats&) = delete;
};

bool aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % alignof(float) == 0; }

// The elements as f32: in place where they are that already, else in `scratch`.
const float* widened(const Level& level, DType dtype, const void* values, size_t count, float* scratch) {
  switch (dtype) {
    case DType::f16:
      level.kernels->widen_f16(scratch, values, count);
      return scratch;
    case DType::bf16:
      level.kernels->widen_bf16(scratch, values, count);
      return scratch;
    default:
      if (aligned(values)) return static_cast<const float*>(values);
      std::memcpy(scratch, values, count * sizeof(float));
      return scratch;
  }
}

void narrowed(const Level& level, DType dtype, void* target, const float* values, size_t count) {
  switch (dtype) {
    case DType::f16:
      level.kernels->narrow_f16(target, values, count);
      return;
    case DType::bf16:
      level.kernels->narrow_bf16(target, values, count);
      return;
    default:
      if (target != values) std::memcpy(target, values, count * sizeof(float));
  }
}

// ---- Special blocks: in double precision, element by element, the same code for all levels.

uint8_t code_at(Scheme scheme, const uint8_t* codes, size_t count, size_t i) {
  if (!is_narrow(scheme)) return codes[i];
  const size_t low = (count + 1) / 2;
  return i < low ? codes[i] & 15 : codes[i - low] >> 4;
}

void put_code(Scheme scheme, uint8_t* codes, size_t count, size_t i, int32_t code) {
  const size_t low = (count + 1) / 2;
  if (!is_narrow(scheme) || i < low) codes[i] = static_cast<uint8_t>(code);
  else codes[i - low] = static_cast<uint8_t>(codes[i - low] | code << 4);
}

void encode_special(Scheme scheme, uint8_t* out, const float* values, size_t count) {
  const int32_t top = top_code(scheme) - 3;
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) continue;
    low = std::min(low, static_cast<double>(values[i]));
    high = std::max(high, static_cast<double>(values[i]));
  }
  if (low > high) low = high = 0;
  low += 0.0;
  const float step = std::max(static_cast<float>((high - low) / top), smallest_step);
  const Head head{-step, {static_cast<float>(low)}};
  std::memcpy(out, &head, head_bytes);
  for (size_t i = 0; i < count; ++i) {
    int32_t code = top + 3;
    if (std::isfinite(values[i])) {
      code = std::min(static_cast<int32_t>(std::nearbyint((values[i] - low) / static_cast<double>(step))), top);
    } else if (!std::isnan(values[i])) {
      code = values[i] < 0 ? top + 1 : top + 2;
    }
    put_code(scheme, out + head_bytes, count, i, code);
  }
}

void decode_special(Scheme scheme, float* target, const Head& head, const uint8_t* codes, size_t count) {
  constexpr double largest = std::numeric_limits<float>::max();
  const int32_t top = top_code(scheme) - 3;
  const double step = -static_cast<double>(head.step), base = head.base;
  for (size_t i = 0; i < count; ++i) {
    const int32_t code = code_at(scheme, codes, count, i);
    if (code <= top) target[i] = static_cast<float>(std::clamp(base + code * step, -largest, largest));
    else if (code == top + 3) target[i] = __builtin_nanf("");
    else target[i] = code == top + 1 ? -__builtin_inff() : __builtin_inff();
  }
}

// ---- Blocks of f32.

// Equal values have a step and a code that bring them back exactly.
void encode_equal(Scheme scheme, uint8_t* out, float value, size_t count) {
  Head head{0.0f, {value}};
  int32_t code = 0;
  if (has_zero(scheme)) {
    head = Head{std::fabs(value), {}};
    head.zero = value < 0 ? 1 : 0;
    code = value > 0 ? 1 : 0;
  }
  std::memcpy(out, &head, head_bytes);
  uint8_t* codes = out + head_bytes;
  std::memset(codes, is_narrow(scheme) ? code | code << 4 : code, code_bytes(scheme, count));
  if (is_narrow(scheme) && count % 2 == 1) codes[count / 2] &= 15;
}

void encode_block(const Level& level, Scheme scheme, uint8_t* out, const float* values, size_t count) {
  const Extent extent = level.quantize->extent(values, count);
  if (extent.top_bits >= special_from_bits) return encode_special(scheme, out, values, count);
  if (extent.low == extent.high) return encode_equal(scheme, out, extent.low, count);
  const auto top = static_cast<float>(top_code(scheme));
  const float low = has_zero(scheme) ? std::min(extent.low, 0.0f) : extent.low;
  const float high = has_zero(scheme) ? std::max(extent.high, 0.0f) : extent.high;
  Head head{std::max((high - low) / top, smallest_step), {low}};
  const float steps_per_unit = 1.0f / head.step;
  float base = low;
  if (has_zero(scheme)) {
    base = std::nearbyint(-low * steps_per_unit);
    head.zero = static_cast<int32_t>(base);
  }
  std::memcpy(out, &head, head_bytes);
  level.quantize->encode[index(scheme)](out + head_bytes, values, count, steps_per_unit, base);
}

void decode_block(const Level& level, Scheme scheme, float* target, const uint8_t* in, size_t count) {
  Head head;
  std::memcpy(&head, in, head_bytes);
  const uint8_t* codes = in + head_bytes;
  if (std::signbit(head.step)) return decode_special(scheme, target, head, codes, count);
  const float base = has_zero(scheme) ? static_cast<float>(head.zero) : head.base;
  level.quantize->decode[index(scheme)](target, codes, count, head.step, base);
}

// ---- Blocks of any dtype, encoded or as they are.

size_t block_bytes(Scheme scheme, DType dtype, size_t count) {
  return std::min(count * kernels::item_bytes(dtype), head_bytes + code_bytes(scheme, count));
}

// One piece on its way through a function: where the next block is, in elements and on the wire.
struct Walk {
  const Level& level = active_level();
  Scheme scheme;
  DType dtype;
  size_t item = kernels::item_bytes(dtype);
  size_t left;
  size_t at = 0;       // bytes of elements behind
  size_t wire_at = 0;  // bytes of the encoding behind

  size_t count() const { return std::min(left, block_elements); }
  size_t wire_bytes() const { return block_bytes(scheme, dtype, count()); }
  bool is_plain() const { return wire_bytes() == count() * item; }
  void next() {
    wire_at += wire_bytes();
    at += count() * item;
    left -= count();
  }

  void encode(uint8_t* out, const float* values) const {
    if (is_plain()) narrowed(level, dtype, out, values, count());
    else encode_block(level, scheme, out, values, count());
  }
  // The values, in `scratch` or in a better place.
  const float* decode(const uint8_t* in, float* scratch) const {
    if (is_plain()) return widened(level, dtype, in, count(), scratch);
    decode_block(level, scheme, scratch, in, count());
    return scratch;
  }
  // Decodes into elements, straight where they are f32.
  void decode_into(void* target, const uint8_t* in, float* scratch) const {
    if (is_plain()) std::memcpy(target, in, count() * item);
    else if (dtype == DType::f32 && aligned(target))
      decode_block(level, scheme, static_cast<float*>(target), in, count());
    else narrowed(level, dtype, target, decode(in, scratch), count());
  }
};

struct alignas(64) Block {
  float at[block_elements];
};

void save(const Level& level, kernels::Backup backup, size_t at, const void* old, size_t bytes) {
  if (backup.at == nullptr) return;
  auto* to = static_cast<uint8_t*>(backup.at) + at;
  if (backup.past_cache) level.kernels->stream_copy(to, old, bytes);
  else std::memcpy(to, old, bytes);
}

void after_saving(kernels::Backup backup) {
#if defined(__SSE2__)
  if (backup.at != nullptr && backup.past_cache) _mm_sfence();  // another thread may restore
#else
  (void)backup;
#endif
}

}  // namespace

bool supports(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f32; }

bool supports(ReduceOp op) { return op != ReduceOp::prod; }

size_t encoded_bytes(Scheme scheme, DType dtype, size_t count) {
  const size_t whole = count / block_elements;
  return whole * block_bytes(scheme, dtype, block_elements) + block_bytes(scheme, dtype, count % block_elements);
}

void encode(Scheme scheme, DType dtype, void* encoded, const void* values, size_t count) {
  const PlainFloats plain;
  Block scratch;
  auto* out = static_cast<uint8_t*>(encoded);
  const auto* in = static_cast<const uint8_t*>(values);
  for (Walk walk{.scheme = scheme, .dtype = dtype, .left = count}; walk.left > 0; walk.next()) {
    if (walk.is_plain()) std::memcpy(out + walk.wire_at, in + walk.at, walk.wire_bytes());
    else walk.encode(out + walk.wire_at, widened(walk.level, dtype, in + walk.at, walk.count(), scratch.at));
  }
}

void decode(Scheme scheme, DType dtype, void* target, const void* encoded, size_t count, kernels::Backup backup) {
  const PlainFloats plain;
  Block scratch;
  auto* out = static_cast<uint8_t*>(target);
  const auto* in = static_cast<const uint8_t*>(encoded);
  for (Walk walk{.scheme = scheme, .dtype = dtype, .left = count}; walk.left > 0; walk.next()) {
    save(walk.level, backup, walk.at, out + walk.at, walk.count() * walk.item);
    walk.decode_into(out + walk.at, in + walk.wire_at, scratch.at);
  }
  after_saving(backup);
}

void reduce(Scheme scheme, DType dtype, ReduceOp op, void* forward, const void* encoded, const void* local,
            size_t count) {
  finish(scheme, dtype, op, forward, encoded, local, count, 1, nullptr, {});
}

void finish(Scheme scheme, DType dtype, ReduceOp op, void* forward, const void* encoded, const void* local,
            size_t count, uint32_t divisor, void* target, kernels::Backup backup) {
  const PlainFloats plain;
  Block incoming, mine, sum;
  auto* out = static_cast<uint8_t*>(forward);
  auto* to = static_cast<uint8_t*>(target);
  const auto* in = static_cast<const uint8_t*>(encoded);
  const auto* from = static_cast<const uint8_t*>(local);
  for (Walk walk{.scheme = scheme, .dtype = dtype, .left = count}; walk.left > 0; walk.next()) {
    const size_t n = walk.count();
    const float* a = walk.decode(in + walk.wire_at, incoming.at);
    const float* b = widened(walk.level, dtype, from + walk.at, n, mine.at);
    kernels::reduce(DType::f32, op, sum.at, a, b, n);
    kernels::divide(DType::f32, sum.at, divisor, n);
    walk.encode(out + walk.wire_at, sum.at);
    if (to == nullptr) continue;
    save(walk.level, backup, walk.at, to + walk.at, n * walk.item);
    walk.decode_into(to + walk.at, out + walk.wire_at, sum.at);
  }
  after_saving(backup);
}

}  // namespace ringfold::quantize
