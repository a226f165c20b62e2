// What a caller asks for: the arrays of a collective call, what is to be done with them, and how all members know it.
//
// The arrays are laid end to end into one virtual range of bytes (item sizes descending, so that a cut at a multiple of
// eight never splits an element).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "ringfold/blocks.hpp"
#include "ringfold/frame.hpp"
#include "ringfold/kernels.hpp"
#include "ringfold/plan.hpp"
#include "ringfold/quantize.hpp"

namespace ringfold {

using Bytes = std::vector<std::byte>;

inline constexpr std::size_t max_tags = 4096;  // called by one peer in an epoch: what its seal may have to list

inline Bytes raw(const Descriptor& descriptor) {
  const auto* at = reinterpret_cast<const std::byte*>(&descriptor);
  return {at, at + sizeof descriptor};
}

struct Span {
  std::byte* source = nullptr;
  std::byte* target = nullptr;
  std::size_t bytes = 0;
  kernels::DType dtype = kernels::DType::u8;
  std::size_t at = 0;  // where it begins in the virtual range
};

// What retries an aborted op: nothing, the engine by itself, or the caller, because its arguments depend on the ring.
enum class Retry : std::uint8_t { never = 0, engine = 1, caller = 2 };

struct OpSpec {
  OpKind kind = OpKind::all_reduce;
  kernels::ReduceOp reduce_op = kernels::ReduceOp::sum;
  quantize::Scheme scheme = quantize::Scheme::none;
  std::uint64_t tag = 0;
  std::uint16_t root = 0;
  Retry retry = Retry::engine;
  bool again = false;  // another attempt of the last call on this tag, which the caller retries
  bool in_place = true;
  bool contribute = true;  // false: this rank's operand does not exist. It is the same call all the same
  Ns timeout = 0;
  std::vector<Span> spans;
  std::uint64_t step = no_step;  // these two are set by the core
  std::uint32_t call = 0;
  // all_gather: the output of all ranks' bytes; reduce_scatter: the output of this rank's chunk.
  std::byte* gathered = nullptr;
  BlocksPtr blocks{};  // all_reduce: what is in the spans is still being copied there
};

// Bytes that several holders share without copying them: a small op's payload is folded, forwarded and kept for a seal.
// One that was never given is not there, which is not the same as empty: its rank contributes nothing.
class Payload {
 public:
  Payload() = default;
  Payload(Bytes bytes)  // NOLINT: bytes become a payload wherever one is wanted
      : bytes_(std::make_shared<const Bytes>(std::move(bytes))) {}
  const std::byte* data() const { return bytes_ ? bytes_->data() : nullptr; }
  std::size_t size() const { return bytes_ ? bytes_->size() : 0; }
  bool is_there() const { return bytes_ != nullptr; }

 private:
  std::shared_ptr<const Bytes> bytes_;
};

using Payloads = std::vector<Payload>;  // by rank

// Calls `visit` for what the range from `from` to `to` has of each span: the span, where in it, where in the range, and
// how much.
template <typename Visit>
void for_spans(const std::vector<Span>& spans, std::size_t from, std::size_t to, Visit visit) {
  auto span = std::upper_bound(spans.begin(), spans.end(), from,
                               [](std::size_t at, const Span& each) { return at < each.at + each.bytes; });
  for (; span != spans.end() && span->at < to; ++span) {
    const std::size_t begin = std::max(from, span->at);
    const std::size_t end = std::min(to, span->at + span->bytes);
    if (begin < end) visit(*span, begin - span->at, begin, end - begin);
  }
}

Descriptor describe(const OpSpec& spec);

// How many bytes the payloads of all ranks may have, together, for an op of this tag to be a small one.
std::size_t max_payload_bytes(std::uint64_t tag);

}  // namespace ringfold
