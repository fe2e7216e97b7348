// The operators of linear layers over quantized weights.

#include <torch/library.h>

#include "huge_pages.h"
#include "levels.h"
#include "linear_int4.h"
#include "linear_int8.h"
#include "linear_kernels.h"
#include "quantize.h"

#if defined(__AMX_INT8__)
#include "linear_int4_amx.h"
#endif

namespace twostep {
namespace {

void check_dtype(at::ScalarType dtype, const char* what) {
  TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16, what, " float32 or bfloat16, not ", dtype);
}

// weight [N, K] -> codes [N, K] uint8, scales and minimums [N, ceil(K / 32)] bfloat16.
std::tuple<at::Tensor, at::Tensor, at::Tensor> quantize(const at::Tensor& weight, int64_t bits, int64_t num_refits) {
  TORCH_CHECK(weight.dim() == 2 && weight.numel() > 0 && (bits == 8 || bits == 4),
              "what is quantized must be a non-empty matrix, to 8 or 4 bits");
  check_dtype(weight.scalar_type(), "what is quantized must be");
  const at::Tensor w = weight.contiguous();
  const int64_t n = w.size(0), k = w.size(1), groups = divide_up(k, quantizing::kGroup);
  at::Tensor codes = at::empty({n, k}, w.options().dtype(at::kByte));
  at::Tensor scales = at::empty({n, groups}, w.options().dtype(at::kBFloat16)), minimums = at::empty_like(scales);
  const auto quantize_all = [&](const auto* rows) {
    run_tasks(n, false, [&](int64_t i) {
      quantizing::quantize_row(rows + i * k, k, bits, num_refits, codes.mutable_data_ptr<uint8_t>() + i * k,
                               scales.mutable_data_ptr<at::BFloat16>() + i * groups,
                               minimums.mutable_data_ptr<at::BFloat16>() + i * groups);
    });
  };
  w.scalar_type() == at::kFloat ? quantize_all(w.const_data_ptr<float>())
                                : quantize_all(w.const_data_ptr<at::BFloat16>());
  return {codes, scales, minimums};
}

// Calls pack_part(panel, part, to) for each part along K of each panel -> [panels, parts, bytes of one] uint8, opaque.
template <class PackPart>
at::Tensor pack(int64_t panels, int64_t parts, int64_t bytes, const PackPart& pack_part) {
  at::Tensor packed = zeros_in_huge_pages({panels, parts, bytes}, at::TensorOptions().dtype(at::kByte));
  uint8_t* to = packed.mutable_data_ptr<uint8_t>();
  run_tasks(panels, false, [&](int64_t panel) {
    for (int64_t part = 0; part < parts; ++part) pack_part(panel, part, to + (panel * parts + part) * bytes);
  });
  return packed;
}

// codes [N, K] and, of each group of `length` along K, a number in each of `others`.
void check_codes(const at::Tensor& codes, int64_t length, std::initializer_list<at::Tensor> others) {
  TORCH_CHECK(codes.dim() == 2 && codes.numel() > 0 && codes.scalar_type() == at::kByte,
              "codes must be a non-empty matrix of bytes");
  for (const at::Tensor& each : others) {
    TORCH_CHECK(each.dim() == 2 && each.size(0) == codes.size(0) && each.size(1) == divide_up(codes.size(1), length),
                "a number per group is missing");
  }
}

const uint8_t* data_of(const at::Tensor& packed, const at::Tensor& x, int64_t n, int64_t group, int64_t columns,
                       int64_t bytes) {
  check_dtype(x.scalar_type(), "linear takes");
  TORCH_CHECK(x.dim() == 2 && packed.dim() == 3, "linear takes rows [T, K] and a packed weight");
  TORCH_CHECK(packed.size(0) == divide_up(n, columns) && packed.size(1) == divide_up(x.size(1), group) &&
                  packed.size(2) == bytes,
              "rows and packed weight differ in size or dtype");
  return packed.const_data_ptr<uint8_t>();
}

// ---- 8 bits ----

bool uses_amx(at::ScalarType dtype) {
#if defined(__AMX_BF16__)
  return dtype == at::kBFloat16 && amx::is_granted();
#else
  static_cast<void>(dtype);
  return false;
#endif
}

// How a kernel wants the words: in panels of that many columns, and with `is_by_step` those of all columns at one place
// of K together, else those of the same columns.
struct Layout {
  int64_t panel;
  bool is_by_step;
};

Layout layout_for(at::ScalarType dtype) {
  if (uses_amx(dtype)) return {2 * vector::kLanes, false};
  return {vector::kPanel, true};
}

struct Quantized {
  const uint8_t* codes;                   // [n, k]
  const at::BFloat16 *scales, *minimums;  // [n, groups]
  int64_t n, k, groups;
};

void pack_int8_group(const Quantized& q, const Layout& layout, int64_t panel, int64_t group, uint32_t* to) {
  constexpr int64_t kLength = 4, kWords = kInt8Group / kLength;
  const int64_t first = panel * layout.panel, columns = std::min(layout.panel, q.n - first);
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t from = (first + column) * q.groups + group;
    to[column] = uint32_t{q.scales[from].x} << 16 | q.minimums[from].x;
  }
  to += layout.panel;
  const int64_t vectors = layout.panel / vector::kLanes;
  for (int64_t i = 0; i < vectors * kWords; ++i, to += vector::kLanes) {
    const int64_t column = (layout.is_by_step ? i % vectors : i / kWords) * vector::kLanes;
    const int64_t k = group * kInt8Group + (layout.is_by_step ? i / vectors : i % kWords) * kLength;
    for (int64_t lane = 0; lane < std::min<int64_t>(vector::kLanes, columns - column); ++lane) {
      const uint8_t* codes = q.codes + (first + column + lane) * q.k + k;
      for (int64_t j = 0; j < std::min(kLength, q.k - k); ++j) to[lane] |= uint32_t{codes[j]} << (8 + j * 8) % 32;
    }
  }
}

// codes [N, K] uint8, scales and minimums [N, ceil(K / 32)] bfloat16, for rows of that dtype.
at::Tensor pack_int8(const at::Tensor& codes, const at::Tensor& scales, const at::Tensor& minimums,
                     at::ScalarType dtype) {
  check_dtype(dtype, "linear takes");
  check_codes(codes, kInt8Group, {scales, minimums});
  const at::Tensor c = codes.contiguous(), s = scales.contiguous(), m = minimums.contiguous();
  const Quantized q{c.const_data_ptr<uint8_t>(), s.const_data_ptr<at::BFloat16>(), m.const_data_ptr<at::BFloat16>(),
                    c.size(0), c.size(1), s.size(1)};
  const Layout layout = layout_for(dtype);
  return pack(divide_up(q.n, layout.panel), q.groups, int8_group_bytes(layout.panel),
              [&](int64_t panel, int64_t group, uint8_t* to) {
                pack_int8_group(q, layout, panel, group, reinterpret_cast<uint32_t*>(to));
              });
}

void multiply_int8(const Problem<float>& p, const uint8_t* packed) {
  vector::multiply<vector::Float32>(p, vector::Int8Weight<vector::Float32>{packed});
}

void multiply_int8(const Problem<at::BFloat16>& p, const uint8_t* packed) {
#if defined(__AMX_BF16__)
  if (amx::is_granted()) return amx::multiply(p, amx::Int8Weight{packed, divide_up(p.k, amx::kStep)});
#endif
  vector::multiply<vector::BFloat16>(p, vector::Int8Weight<vector::BFloat16>{packed});
}

// ---- 4 bits ----

// weight [N, K] and what `quantize` made of it in 4 bits -> codes [N, K], levels [N, ceil(K / 32)] (zero << 4 |
// multiplier) uint8, scales [N, ceil(K / 256)] bfloat16.
std::tuple<at::Tensor, at::Tensor, at::Tensor> to_levels(const at::Tensor& weight, const at::Tensor& scales,
                                                         const at::Tensor& minimums) {
  check_dtype(weight.scalar_type(), "what is quantized must be");
  const at::Tensor w = weight.contiguous(), s = scales.contiguous(), m = minimums.contiguous();
  const int64_t n = w.size(0), k = w.size(1), groups = divide_up(k, quantizing::kGroup);
  at::Tensor codes = at::empty({n, k}, w.options().dtype(at::kByte)), found = at::empty({n, groups}, codes.options());
  check_codes(codes, quantizing::kGroup, {s, m});
  at::Tensor shared = at::empty({n, divide_up(k, integers::kGroup)}, s.options());
  const auto level_all = [&](const auto* rows) {
    run_tasks(n, false, [&](int64_t i) {
      levels::level_row(rows + i * k, k, s.const_data_ptr<at::BFloat16>() + i * groups,
                        m.const_data_ptr<at::BFloat16>() + i * groups, codes.mutable_data_ptr<uint8_t>() + i * k,
                        found.mutable_data_ptr<uint8_t>() + i * groups,
                        shared.mutable_data_ptr<at::BFloat16>() + i * shared.size(1));
    });
  };
  w.scalar_type() == at::kFloat ? level_all(w.const_data_ptr<float>()) : level_all(w.const_data_ptr<at::BFloat16>());
  return {codes, found, shared};
}

struct Leveled {
  const uint8_t *codes, *levels;  // [n, k], [n, subgroups]
  const at::BFloat16* scales;     // [n, groups]
  int64_t n, k, subgroups, groups;
};

void pack_int4_column(const Leveled& q, int64_t column, int64_t step, uint8_t* tile) {
  const int64_t lane = column % kLanes, start = step * int4::kStep, first = step * int4::kStep / int4::kSubgroup;
  const uint8_t* levels = q.levels + column * q.subgroups;
  uint32_t header = uint32_t{q.scales[column * q.groups + start / integers::kGroup].x} << 16 | levels[first];
  if (first + 1 < q.subgroups) header |= uint32_t{levels[first + 1]} << 8;
  std::memcpy(tile + lane * sizeof(header), &header, sizeof(header));
  const uint8_t* codes = q.codes + column * q.k + start;
  for (int64_t i = 0; i < std::min(int4::kStep, q.k - start); ++i) {
    tile[int4::kHeaderBytes + i / 8 * int4::kLineBytes + lane * 4 + i % 4] |= codes[i] << i % 8 / 4 * 4;
  }
}

// Of what to_levels found.
at::Tensor pack_int4(const at::Tensor& codes, const at::Tensor& levels, const at::Tensor& scales) {
  check_codes(codes, int4::kSubgroup, {levels});
  check_codes(codes, integers::kGroup, {scales});
  const at::Tensor c = codes.contiguous(), l = levels.contiguous(), s = scales.contiguous();
  const Leveled q{c.const_data_ptr<uint8_t>(), l.const_data_ptr<uint8_t>(), s.const_data_ptr<at::BFloat16>(),
                  c.size(0), c.size(1), l.size(1), s.size(1)};
  return pack(divide_up(q.n, int4::kPanel), divide_up(q.k, int4::kStep), int4::kStepBytes,
              [&](int64_t panel, int64_t step, uint8_t* to) {
                const int64_t first = panel * int4::kPanel;
                for (int64_t column = first; column < std::min(first + int4::kPanel, q.n); ++column) {
                  pack_int4_column(q, column, step, to + (column - first) / kLanes * int4::kTileBytes);
                }
              });
}

template <class Element>
void multiply_int4(const Problem<Element>& p, const uint8_t* packed) {
  const integers::Rows rows = integers::round_rows(p);
#if defined(__AMX_INT8__)
  if (p.rows > int4::kFewRows && amx::is_granted()) return int4::multiply_amx(p, rows, packed);
#endif
  int4::multiply_vectors(p, rows, packed);
}

}  // namespace

// As `linear`, over what pack_int8 made for x's dtype.
at::Tensor linear_int8(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                       Activation activation) {
  const int64_t columns = layout_for(x.scalar_type()).panel;
  const uint8_t* data = data_of(packed, x, n, kInt8Group, columns, int8_group_bytes(columns));
  if (activation != Activation::kNone && !gates_itself(x.scalar_type(), n)) {
    return gate(linear_int8(x, packed, bias, n), activation);
  }
  return multiply_rows_of(x, bias, n, activation, [&](const auto& problem) { multiply_int8(problem, data); });
}

// As `linear`, over what pack_int4 made; rows are rounded to 8 bits.
at::Tensor linear_int4(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t n,
                       Activation activation) {
  const uint8_t* data = data_of(packed, x, n, int4::kStep, int4::kPanel, int4::kStepBytes);
  if (activation != Activation::kNone && n % int4::kPanel != 0) {
    return gate(linear_int4(x, packed, bias, n), activation);
  }
  return multiply_rows_of(x, bias, n, activation, [&](const auto& problem) { multiply_int4(problem, data); });
}

}  // namespace twostep

TORCH_LIBRARY_FRAGMENT(twostep, m) {
  m.def("quantize(Tensor weight, int bits, int num_refits) -> (Tensor, Tensor, Tensor)");
  m.def("to_levels(Tensor weight, Tensor scales, Tensor minimums) -> (Tensor, Tensor, Tensor)");
  m.def("pack_int8(Tensor codes, Tensor scales, Tensor minimums, ScalarType dtype) -> Tensor");
  m.def("pack_int4(Tensor codes, Tensor levels, Tensor scales) -> Tensor");
  m.def("linear_int8(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_int4(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor");
}

TORCH_LIBRARY_IMPL(twostep, CPU, m) {
  m.impl("quantize", twostep::quantize);
  m.impl("to_levels", twostep::to_levels);
  m.impl("pack_int8", twostep::pack_int8);
  m.impl("pack_int4", twostep::pack_int4);
  m.impl("linear_int8", [](const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t n) { return twostep::linear_int8(x, packed, bias, n); });
  m.impl("linear_int4", [](const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                            int64_t n) { return twostep::linear_int4(x, packed, bias, n); });
}
