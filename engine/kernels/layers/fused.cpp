// The operations of a decoder layer between its matmuls and its attention, each in one pass over memory.
//
// Results are rounded wherever the plain layers of transformers round, so all but the sum of squares in a norm is, bit
// for bit, what they compute, except for what rounding makes zero (rounded_to_halves in vec.h). That sum has an order
// of its own: sixteen lanes, folded at the end. Every row is computed by itself.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/operators.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "layers/row_math.h"

namespace twostep {
namespace {

using namespace row_math;

template <class Element>
void add(const Element* a, const Element* b, int64_t size, Element* to) {
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    store_upto(to + i, count, load_upto(a + i, count) + load_upto(b + i, count));
  });
}

template <class Element>
void scale(Element* x, int64_t size, float factor) {
  const Vec factors = broadcast(factor);
  for_each_vector(size, [&](int64_t i, int64_t count)
                            TWOSTEP_INLINE { store_upto(x + i, count, load_upto(x + i, count) * factors); });
}

// (x - mean) / sqrt(mean((x - mean)**2) + eps) * weight + bias, rounded once.
template <class Element>
void normalize_centered(const Element* x, const float* weight, const float* bias, int64_t size, float eps,
                        Element* to) {
  Vec sums{}, squares{};
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE { sums = sums + load_upto(x + i, count); });
  const Vec mean = broadcast(fold_add(sums) / float(size));
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    Vec v = load_upto(x + i, count) - mean;
    if (count < kLanes) {  // what is behind a row's end adds nothing
      alignas(64) float values[kLanes];
      store(values, v);
      v = load_upto(values, count);
    }
    squares = squares + v * v;
  });
  const Vec factor = broadcast(1.0f / std::sqrt(fold_add(squares) / float(size) + eps));
  for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
    const Vec scaled = (load_upto(x + i, count) - mean) * factor * load_upto(weight + i, count);
    store_upto(to + i, count, bias ? scaled + load_upto(bias + i, count) : scaled);
  });
}

void check_weight(const Tensor& weight, const Tensor& like, int64_t size) {
  const bool has_dtype = weight.scalar_type() == like.scalar_type() || weight.scalar_type() == kFloat;
  TWOSTEP_CHECK(has_dtype && weight.is_contiguous() && weight.numel() == size,
                "a norm's weight must be contiguous, of the rows' dtype or float32, with ", size, " elements");
  TWOSTEP_CHECK(size > 0, "rows of a norm must not be empty");
}

void check_rotation(const Tensor& angles, const Tensor& qkv, int64_t rows, int64_t head_size) {
  const int64_t width = angles.size(-1);
  const bool has_dtype = angles.scalar_type() == qkv.scalar_type() || angles.scalar_type() == kFloat;
  TWOSTEP_CHECK(has_dtype && angles.is_contiguous(), "cos and sin must be contiguous, of the rows' dtype or float32");
  TWOSTEP_CHECK(width % 2 == 0 && width <= head_size, "cos and sin have ", head_size,
                " columns at most, an even number");
  TWOSTEP_CHECK(angles.numel() == rows * width, "every row has its angles");
}

// Heads whose norm is that of a whole row count as one.
int64_t normed_heads(const Tensor& weight, int64_t num_heads, int64_t head_size) {
  return weight.numel() == head_size ? num_heads : 1;
}

void check_fits(const Tensor& tensor, const Tensor& like, int64_t size, const char* name) {
  TWOSTEP_CHECK(tensor.scalar_type() == like.scalar_type() && tensor.is_contiguous() && tensor.size(-1) == size, name,
                " must be contiguous, of the rows' dtype, with ", size, " columns");
}

}  // namespace

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps, const Buffer& buffer) {
  const Tensor rows = x.contiguous();
  const int64_t size = rows.size(-1);
  check_weight(weight, rows, size);
  const Tensor& out = buffer.get(rows.sizes(), rows);
  with_elements_of(rows, weight, [&]<class Element, class Weight>(Element*, Weight*) {
    const auto* from = rows.const_data_ptr<Element>();
    const auto* scale = weight.const_data_ptr<Weight>();
    auto* to = out.mutable_data_ptr<Element>();
    for_each_row(rows.numel() / size, size, [&](int64_t row) {
      normalize(from + row * size, scale, size, float(eps), to + row * size);
    });
  });
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& residual, const Tensor& x, const Tensor& weight, double eps,
                                        const Buffer& to_sum, const Buffer& to_normed) {
  const Tensor left = residual.contiguous(), right = x.contiguous();
  const int64_t size = left.size(-1);
  TWOSTEP_CHECK(left.sizes() == right.sizes(), "residual and x differ in shape");
  check_fits(right, left, size, "x"), check_weight(weight, left, size);
  const Tensor &sum = to_sum.get(left.sizes(), left), &out = to_normed.get(left.sizes(), left);
  with_elements_of(left, weight, [&]<class Element, class Weight>(Element*, Weight*) {
    const auto *a = left.const_data_ptr<Element>(), *b = right.const_data_ptr<Element>();
    const auto* scale = weight.const_data_ptr<Weight>();
    auto *sums = sum.mutable_data_ptr<Element>(), *to = out.mutable_data_ptr<Element>();
    for_each_row(left.numel() / size, size, [&](int64_t row) {
      add(a + row * size, b + row * size, size, sums + row * size);
      normalize(sums + row * size, scale, size, float(eps), to + row * size);
    });
  });
  return {sum, out};
}

Tensor add_rows(const Tensor& residual, const Tensor& x, const Buffer& buffer) {
  const Tensor left = residual.contiguous(), right = x.contiguous();
  const int64_t size = left.size(-1);
  TWOSTEP_CHECK(left.sizes() == right.sizes(), "residual and x differ in shape");
  check_fits(right, left, size, "x");
  const Tensor& out = buffer.get(left.sizes(), left);
  with_element_of(left, [&]<class Element>(Element*) {
    const auto *a = left.const_data_ptr<Element>(), *b = right.const_data_ptr<Element>();
    auto* to = out.mutable_data_ptr<Element>();
    for_each_row(left.numel() / std::max<int64_t>(1, size), size,
                 [&](int64_t row) { add(a + row * size, b + row * size, size, to + row * size); });
  });
  return out;
}

void scale_rows(const Tensor& x, double factor) {
  TWOSTEP_CHECK(x.is_contiguous(), "rows that are scaled must be contiguous");
  const int64_t size = x.size(-1);
  with_element_of(x, [&]<class Element>(Element*) {
    auto* data = x.mutable_data_ptr<Element>();
    for_each_row(x.numel() / std::max<int64_t>(1, size), size, [&](int64_t row) {
      scale(data + row * size, size, float(factor));
    });
  });
}

void scale_columns(const Tensor& x, const Tensor& factors) {
  TWOSTEP_CHECK(x.dim() == 2 && x.is_contiguous(), "rows that are scaled must be contiguous");
  const int64_t size = x.size(1);
  TWOSTEP_CHECK(factors.scalar_type() == kFloat && factors.is_contiguous() && factors.numel() == size,
                "each of ", size, " columns has a factor in float32");
  const auto* numbers = factors.const_data_ptr<float>();
  with_element_of(x, [&]<class Element>(Element*) {
    auto* data = x.mutable_data_ptr<Element>();
    for_each_row(x.size(0), size, [&](int64_t row) {
      Element* own = data + row * size;
      for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        store_upto(own + i, count, load_upto(own + i, count) * load_upto(numbers + i, count));
      });
    });
  });
}

void add_gated_rows(const Tensor& sum, const Tensor& x, const std::optional<Tensor>& gates) {
  TWOSTEP_CHECK(sum.dim() == 2 && sum.is_contiguous() && sum.sizes() == x.sizes(), "sum and x differ in shape");
  check_fits(x, sum, sum.size(1), "x");
  if (gates) check_fits(*gates, sum, 1, "gates");
  const int64_t size = sum.size(1);
  with_element_of(sum, [&]<class Element>(Element* element) {
    auto* sums = sum.mutable_data_ptr<Element>();
    const auto* from = x.const_data_ptr<Element>();
    const auto* gate = gates ? gates->const_data_ptr<Element>() : nullptr;
    for_each_row(sum.size(0), size, [&](int64_t row) {
      Element* to = sums + row * size;
      if (!gate) return add(to, from + row * size, size, to);
      const Vec factor = rounded_to(Sigmoid::apply(broadcast(float(gate[row]))), element);
      for_each_vector(size, [&](int64_t i, int64_t count) TWOSTEP_INLINE {
        const Vec weighed = rounded_to(factor * load_upto(from + row * size + i, count), element);
        store_upto(to + i, count, load_upto(to + i, count) + weighed);
      });
    });
  });
}

Tensor layer_norm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, double eps,
                  const Buffer& buffer) {
  const Tensor rows = x.contiguous();
  const int64_t size = rows.size(-1);
  for (const Tensor& each : {weight, bias.value_or(weight)}) {
    check_weight(each, rows, size);
    TWOSTEP_CHECK(each.scalar_type() == kFloat, "weight and bias of a layer norm are in float32");
  }
  const Tensor& out = buffer.get(rows.sizes(), rows);
  with_element_of(rows, [&]<class Element>(Element*) {
    const auto* from = rows.const_data_ptr<Element>();
    const auto* scale = weight.const_data_ptr<float>();
    const float* shift = bias ? bias->const_data_ptr<float>() : nullptr;
    auto* to = out.mutable_data_ptr<Element>();
    for_each_row(rows.numel() / size, size, [&](int64_t row) {
      normalize_centered(from + row * size, scale, shift, size, float(eps), to + row * size);
    });
  });
  return out;
}

void norm_heads(const Tensor& heads, const Tensor& weight, const std::optional<Tensor>& bias, double eps) {
  TWOSTEP_CHECK(heads.dim() == 3 && heads.stride(2) == 1, "heads lie in the columns of a matrix");
  const int64_t count = heads.size(1), size = heads.size(2);
  const bool is_of_each = weight.numel() != size;
  for (const Tensor& each : {weight, bias.value_or(weight)}) {
    check_weight(each, heads, is_of_each ? count * size : size);
    TWOSTEP_CHECK(each.scalar_type() == kFloat, "weight and bias of a layer norm are in float32");
  }
  with_element_of(heads, [&]<class Element>(Element*) {
    const auto* scale = weight.const_data_ptr<float>();
    const float* shift = bias ? bias->const_data_ptr<float>() : nullptr;
    auto* data = heads.mutable_data_ptr<Element>();
    for_each_row(heads.size(0), count * size, [&](int64_t row) {
      for (int64_t head = 0; head < count; ++head) {
        Element* at = data + row * heads.stride(0) + head * heads.stride(1);
        const int64_t own = is_of_each ? head * size : 0;
        normalize_centered(at, scale + own, shift ? shift + own : nullptr, size, float(eps), at);
      }
    });
  });
}

void rotate_heads(const Tensor& qkv, const Tensor& cos, const Tensor& sin, int64_t num_heads, int64_t num_kv_heads,
                  const std::optional<Tensor>& query_norm, const std::optional<Tensor>& key_norm, double eps,
                  bool in_pairs, bool norms_last, const std::optional<Tensor>& query_scales) {
  TWOSTEP_CHECK(qkv.dim() == 2 && (qkv.is_contiguous() || qkv.stride(1) == 1), "heads lie in the columns of a matrix");
  TWOSTEP_CHECK(num_heads > 0 && num_kv_heads >= 0, "there must be heads");
  const int64_t rows = qkv.size(0), width = qkv.size(1), all_heads = num_heads + 2 * num_kv_heads;
  const int64_t size = width / all_heads, turned = cos.size(-1), stride = qkv.stride(0);
  TWOSTEP_CHECK(size * all_heads == width && size % 2 == 0, "rows of ", width, " are not ", all_heads, " even heads");
  for (const Tensor& angles : {cos, sin}) check_rotation(angles, qkv, rows, size);
  TWOSTEP_CHECK(cos.sizes() == sin.sizes() && cos.scalar_type() == sin.scalar_type(), "cos and sin differ");
  const auto norms = {std::pair{query_norm, num_heads}, std::pair{key_norm, num_kv_heads}};
  for (const auto& [norm, heads] : norms) {
    if (norm) check_weight(*norm, qkv, heads / normed_heads(*norm, heads, size) * size);
  }
  const bool have_one_dtype = !query_norm || !key_norm || query_norm->scalar_type() == key_norm->scalar_type();
  TWOSTEP_CHECK(have_one_dtype, "the norms of queries and keys have weights of one dtype");
  const bool are_scales = !query_scales || (query_scales->scalar_type() == kFloat && query_scales->is_contiguous() &&
                                            query_scales->numel() == rows);
  TWOSTEP_CHECK(are_scales, "queries of every row have a scale, in float32");
  const float* scales = query_scales ? query_scales->const_data_ptr<float>() : nullptr;
  const Tensor& any_norm = query_norm ? *query_norm : key_norm ? *key_norm : qkv;
  const auto normalize_heads = [&](int64_t row) {
    with_elements_of(qkv, any_norm, [&]<class Element, class Weight>(Element*, Weight*) {
      auto* first = qkv.mutable_data_ptr<Element>() + row * stride;
      for (const auto& [norm, heads] : norms) {
        const int64_t count = norm ? normed_heads(*norm, heads, size) : 0, each = count ? heads / count * size : 0;
        for (int64_t head = 0; head < count; ++head) {
          Element* at = first + head * each;
          normalize(at, norm->template const_data_ptr<Weight>(), each, float(eps), at);
        }
        first += heads * size;
      }
    });
  };
  with_elements_of(qkv, cos, [&]<class Element, class Table>(Element*, Table*) {
    const auto *cosines = cos.const_data_ptr<Table>(), *sines = sin.const_data_ptr<Table>();
    auto* data = qkv.mutable_data_ptr<Element>();
    const auto turn = in_pairs ? &rotate_pairs<Element, Table> : &rotate<Element, Table>;
    const bool has_norms = query_norm || key_norm;
    for_each_row(rows, width, [&](int64_t row) {
      if (has_norms && !norms_last) normalize_heads(row);
      for (int64_t head = 0; turned > 0 && head < num_heads + num_kv_heads; ++head) {
        turn(data + row * stride + head * size, cosines + row * turned, sines + row * turned, turned / 2);
      }
      if (has_norms && norms_last) normalize_heads(row);
      if (scales) scale(data + row * stride, num_heads * size, scales[row]);
    });
  });
}

Tensor gate(const Tensor& gate_up, Activation activation, const Buffer& buffer) {
  TWOSTEP_CHECK(gate_up.dim() == 2 && gate_up.size(1) % 2 == 0, "a row has as many columns of gate as of up");
  const Tensor rows = gate_up.contiguous();
  const int64_t size = rows.size(1) / 2;
  const Tensor& out = buffer.get({rows.size(0), size}, rows);
  with_element_of(rows, [&]<class Element>(Element*) {
    const auto* from = rows.const_data_ptr<Element>();
    auto* to = out.mutable_data_ptr<Element>();
    with_activation(activation, [&]<class Op>() {
      const auto gate_one = [&](int64_t row) { gate_row<Op>(from + row * 2 * size, size, to + row * size); };
      for_each_row(rows.size(0), size, gate_one);
    });
  });
  return out;
}

}  // namespace twostep
