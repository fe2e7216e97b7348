// The operators of linear layers whose weights have the format of the rows, float32 or bfloat16, or stay in the blocks
// of a file, for rows of float32.

#include <optional>
#include <utility>

#include "base/tensor.h"
#include "linear/rounded_blocks.h"
#include "linear/vector.h"

#if defined(__AMX_BF16__)
#include "base/array_ref.h"
#include "base/bfloat16.h"
#include "base/check.h"
#include "linear/amx.h"
#endif

namespace twostep {
namespace {

// Whether a matmul with n columns applies the gate to its sums; else gating is a step of its own.
bool gates_itself(int64_t n) {
  constexpr int64_t kPair = 2 * kGateBlock;  // blocks of gate and up, which must lie in one panel
  return vector::kPanel % kPair == 0 && n % kPair == 0 && !vector::is_narrow(n);
}

void check_dtype(const Tensor& tensor) {
  TWOSTEP_CHECK(tensor.scalar_type() == kFloat || tensor.scalar_type() == kBFloat16,
                "linear takes float32 or bfloat16, not ", tensor.scalar_type());
}

// Columns of a panel and K of a step of a weight with n columns that is not coded.
std::pair<int64_t, int64_t> panel_sizes([[maybe_unused]] Dtype dtype, int64_t n) {
#if defined(__AMX_BF16__)
  if (dtype == kBFloat16 && amx::is_granted()) return {amx::kPanel, amx::kStep};
#endif
  return {vector::is_narrow(n) ? vector::kLanes : vector::kPanel, vector::kStep};
}

void multiply_plain(Problems<float> problems) {
  vector::multiply<vector::Float32, vector::NarrowFloat32>(problems);
}

void multiply_plain(Problems<BFloat16> problems) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::multiply(problems);
#endif
  vector::multiply<vector::BFloat16, vector::NarrowBFloat16>(problems);
}

#if defined(__AVX2__)
bool is_coded(const Tensor& packed, int64_t n, int64_t k) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::is_coded(packed, n, k);
#endif
  return vector::is_coded(packed, n, k);
}

void multiply_coded(Problems<BFloat16> problems) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::multiply_coded(problems);
#endif
  vector::multiply_coded(problems);
}
#endif

// Whether the weight was packed for rows [T, k] of that dtype, and has n columns.
bool fits(const Tensor& packed, Dtype dtype, int64_t n, int64_t k) {
  if (packed.scalar_type() == kByte && dtype == kFloat) return blocks::is_packed(packed, n, k);
#if defined(__AVX2__)
  if (packed.scalar_type() == kByte) return dtype == kBFloat16 && is_coded(packed, n, k);
#endif
  const auto [panel, step] = panel_sizes(dtype, n);
  return packed.sizes() == IntArrayRef({divide_up(n, panel), divide_up(k, step), panel, step}) &&
         packed.is_contiguous() && packed.scalar_type() == dtype;
}

// Weights in blocks that are multiplied by rows of integers have a loop of their own.
void multiply_bytes(Problems<float> problems) {
  ProblemList<float> for_integers, exact;
  for (const auto& p : problems) (blocks::header_of(p.packed).is_for_integers ? for_integers : exact).push_back(p);
  if (!for_integers.empty()) rounded::multiply_all(for_integers);
  if (!exact.empty()) vector::multiply_blocks(exact);
}

void multiply_bytes([[maybe_unused]] Problems<BFloat16> problems) {
#if defined(__AVX2__)
  multiply_coded(problems);
#endif
}

// Not all weights may be coded, or in blocks: those that are, and those that are not, have a loop each.
template <class Element>
void multiply_all(Problems<Element> problems) {
  ProblemList<Element> bytes, plain;
  for (const auto& p : problems) (p.is_bytes ? bytes : plain).push_back(p);
  if (!bytes.empty()) multiply_bytes(Problems<Element>(bytes));
  if (!plain.empty()) multiply_plain(Problems<Element>(plain));
}

}  // namespace

Tensor pack_weight(const Tensor& weight, [[maybe_unused]] bool may_be_coded) {
  check_dtype(weight);
  TWOSTEP_CHECK(weight.dim() == 2 && weight.numel() > 0, "weight must be a non-empty matrix");
  const Tensor dense = weight.contiguous();
  if (dense.scalar_type() == kFloat) return vector::pack<vector::Float32, vector::NarrowFloat32>(dense);
#if defined(__AMX_BF16__)
  if (amx::is_granted()) {
    const std::optional<Tensor> coded = may_be_coded ? amx::pack_coded(dense) : std::nullopt;
    return coded ? *coded : amx::pack(dense);
  }
#endif
#if defined(__AVX2__)
  const bool is_wide = !vector::is_narrow(dense.size(0));
  const std::optional<Tensor> coded = may_be_coded && is_wide ? vector::pack_coded(dense) : std::nullopt;
  if (coded) return *coded;
#endif
  return vector::pack<vector::BFloat16, vector::NarrowBFloat16>(dense);
}

Tensor grouped_linear(const Tensor& x, Shares shares, int64_t n, Activation activation, const Buffer& out) {
  check_dtype(x);
  TWOSTEP_CHECK(x.dim() == 2, "linear takes rows [T, K]");
  if (activation != Activation::kNone && !gates_itself(n)) {
    return gate(grouped_linear(x, shares, n), activation, out);
  }
  for (const Share& each : shares) {
    TWOSTEP_CHECK(fits(*each.packed, x.scalar_type(), n, x.size(1)), "rows and packed weight differ in size or dtype");
  }
  return multiply_rows_of(x, shares, n, activation, out,
                          []<class Element>(Problems<Element> problems) { multiply_all(problems); });
}

Tensor linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t n,
              Activation activation, const Buffer& out) {
  return grouped_linear(x, share_of(x, packed, bias), n, activation, out);
}

}  // namespace twostep
