#include "layers/latent_attention.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/array_ref.h"
#include "base/check.h"
#include "base/rows.h"
#include "base/tensor.h"
#include "base/thread_pool.h"
#include "layers/row_math.h"

namespace twostep {
namespace {

using namespace row_math;

// Copies rows [A, B, N] of one tensor to another, whose numbers lie side by side in each row.
void copy_rows(const Tensor& from, const Tensor& to) {
  TWOSTEP_CHECK(from.sizes() == to.sizes() && from.stride(2) == 1 && to.stride(2) == 1, "rows are copied as they are");
  const int64_t inner = from.size(1), item = from.element_size(), size = from.size(2) * item;
  const auto* source = static_cast<const char*>(from.const_data_ptr());
  auto* target = static_cast<char*>(to.mutable_data_ptr());
  for_each_row(from.size(0) * inner, from.size(2), [&](int64_t row) {
    const int64_t i = row / inner, j = row % inner;
    std::memcpy(target + (i * to.stride(0) + j * to.stride(1)) * item,
                source + (i * from.stride(0) + j * from.stride(1)) * item, size);
  });
}

// Numbers of a head: those of a query that meet keys as they are, those of a latent, and those that are rotated.
struct Sizes {
  int64_t num_heads, plain, latent, rotated;

  int64_t query() const { return plain + rotated; }
  int64_t key() const { return latent + rotated; }
};

// Rotates `half` pairs, from one place to another.
template <class Element, class Table>
void rotate_into(const Element* from, const Table* cos, const Table* sin, int64_t half, Rotated rotated, Element* to) {
  if (rotated == Rotated::kPairsApart) {
    for (int64_t i = 0; i < half; ++i) to[i] = from[2 * i], to[half + i] = from[2 * i + 1];
  } else {
    std::copy_n(from, 2 * half, to);
  }
  rotated == Rotated::kPairs ? rotate_pairs(to, cos, sin, half) : rotate(to, cos, sin, half);
}

// Projected rows of a step, and what becomes of them.
struct Rows {
  Tensor queries, latents;  // [T, num_heads * query size], [T, key size]
  Tensor plain;             // [num_heads, T, plain]
  Tensor query, key;        // [T, num_heads, key size], whose first numbers are left alone, and [T, 1, key size]
};

// Norms latents, rotates what is rotated of them and of queries, and puts the rest of these apart.
template <class Element, class Weight, class Table>
void arrange(const Rows& rows, const Angles& angles, const Norm& norm, const Sizes& sizes, Rotated rotated) {
  const auto *queries = rows.queries.const_data_ptr<Element>(), *latents = rows.latents.const_data_ptr<Element>();
  auto *plain = rows.plain.mutable_data_ptr<Element>(), *query = rows.query.mutable_data_ptr<Element>();
  auto* key = rows.key.mutable_data_ptr<Element>();
  const auto* weight = norm.weight.const_data_ptr<Weight>();
  const auto *cosines = angles.cos.const_data_ptr<Table>(), *sines = angles.sin.const_data_ptr<Table>();
  const int64_t count = rows.queries.size(0), half = sizes.rotated / 2;
  for_each_row(count, sizes.num_heads * sizes.query(), [&](int64_t t) {
    const Table *cos = cosines + t * sizes.rotated, *sin = sines + t * sizes.rotated;
    const Element* latent = latents + t * sizes.key();
    Element* own_key = key + t * sizes.key();
    normalize(latent, weight, sizes.latent, float(norm.eps), own_key);
    rotate_into(latent + sizes.latent, cos, sin, half, rotated, own_key + sizes.latent);
    for (int64_t head = 0; head < sizes.num_heads; ++head) {
      const Element* from = queries + (t * sizes.num_heads + head) * sizes.query();
      std::copy_n(from, sizes.plain, plain + (head * count + t) * sizes.plain);
      Element* to = query + (t * sizes.num_heads + head) * sizes.key() + sizes.latent;
      rotate_into(from + sizes.plain, cos, sin, half, rotated, to);
    }
  });
}

void check(const Rows& rows, const Angles& angles, const Norm& norm, const Sizes& sizes) {
  const int64_t count = rows.queries.size(0);
  TWOSTEP_CHECK(rows.queries.size(1) == sizes.num_heads * sizes.query() && sizes.plain > 0 && sizes.rotated >= 0 &&
                    sizes.rotated % 2 == 0,
                "each head has a part that is rotated, and one that is not");
  for (const Tensor* table : {&angles.cos, &angles.sin}) {
    TWOSTEP_CHECK(table->is_contiguous() && table->scalar_type() == angles.cos.scalar_type() &&
                      table->numel() == count * sizes.rotated,
                  "every row has its angles");
    TWOSTEP_CHECK(table->scalar_type() == rows.queries.scalar_type() || table->scalar_type() == kFloat,
                  "angles have the rows' dtype, or float32");
  }
  const Tensor& weight = norm.weight;
  TWOSTEP_CHECK(weight.is_contiguous() && weight.numel() == sizes.latent && sizes.latent > 0 &&
                    (weight.scalar_type() == rows.queries.scalar_type() || weight.scalar_type() == kFloat),
                "a latent's norm has its weight");
  TWOSTEP_CHECK(rows.queries.is_contiguous() && rows.latents.is_contiguous() && rows.latents.size(0) == count &&
                    rows.latents.scalar_type() == rows.queries.scalar_type(),
                "queries and latents are rows of one step");
}

}  // namespace

Tensor LatentAttention::queries_of(const Tensor& normed, const Workspace& work, const AdapterRows& rows) const {
  if (!query_down) return (*query)(normed, work.qkv, Activation::kNone, rows);
  const Tensor down = (**query_down)(normed, work.query_down, Activation::kNone, rows);
  return (*query)((*query_norm)->in_place(down), work.qkv, Activation::kNone, rows);
}

Heads LatentAttention::project(const Tensor& normed, const Angles& angles, Workspace& work,
                               const AdapterRows& rows) const {
  const Tensor queries = queries_of(normed, work, rows);
  const Tensor latents = (*latent)(normed, work.latents, Activation::kNone, rows);
  const int64_t count = normed.size(0), size = latent_norm->weight.numel(), turned = latents.size(1) - size;
  const Sizes sizes{num_heads(), queries.size(1) / num_heads() - turned, size, turned};
  const Rows all{queries, latents, work.plain.get({num_heads(), count, sizes.plain}, queries),
                 work.query.get({count, num_heads(), sizes.key()}, queries),
                 work.key.get({count, 1, sizes.key()}, queries)};
  check(all, angles, *latent_norm, sizes);
  with_elements_of(queries, latent_norm->weight, [&]<class Element, class Weight>(Element*, Weight*) {
    with_elements_of(queries, angles.cos, [&]<class Same, class Table>(Same*, Table*) {
      arrange<Element, Weight, Table>(all, angles, *latent_norm, sizes, rotated);
    });
  });
  const Tensor absorbed = keys->multiply_each(all.plain, work.absorbed);
  copy_rows(absorbed.transpose(0, 1), all.query.narrow(2, 0, size));
  return {all.query, all.key, all.key.narrow(2, 0, size)};
}

Tensor LatentAttention::finished(const Tensor& attended, const Workspace& work) const {
  const int64_t count = attended.size(0), size = attended.size(1) / num_heads();
  const Tensor& sums = work.sums.get({num_heads(), count, size}, attended);
  copy_rows(attended.contiguous().view({count, num_heads(), size}).transpose(0, 1), sums);
  const Tensor expanded = values->multiply_each(sums, work.expanded);
  const Tensor& out = work.values.get({count, num_heads(), expanded.size(2)}, attended);
  copy_rows(expanded.transpose(0, 1), out);
  return out.flatten(1);
}

}  // namespace twostep
