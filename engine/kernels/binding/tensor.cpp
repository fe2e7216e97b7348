// What kernels ask of torch: its tensors, its errors and how many threads it may use.

#include "base/tensor.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <new>
#include <utility>

#include "base/check.h"
#include "base/thread_pool.h"

namespace twostep {

void raise(const std::string& message) { TORCH_CHECK(false, message); }
void raise_not_implemented(const std::string& message) { TORCH_CHECK_NOT_IMPLEMENTED(false, message); }

namespace {

static_assert(sizeof(at::Tensor) == sizeof(void*));

constexpr at::ScalarType torch_of(Dtype dtype) { return static_cast<at::ScalarType>(dtype); }
const at::Tensor& torch_of(const Tensor& tensor) { return tensor; }
at::IntArrayRef torch_of(IntArrayRef sizes) { return {sizes.data(), sizes.size()}; }

template <class... Element>
constexpr bool kAreTorchs = ((torch_of(dtype_of<Element>()) == c10::CppTypeToScalarType<Element>::value) && ...);
static_assert(kBFloat16 == static_cast<Dtype>(at::kBFloat16) && sizeof(BFloat16) == sizeof(at::BFloat16));
static_assert(kAreTorchs<uint8_t, int8_t, int32_t, int64_t, float, double, bool>);

}  // namespace

Tensor::Tensor(const at::Tensor& tensor) : Tensor(at::Tensor(tensor)) {}

Tensor::Tensor(at::Tensor&& tensor) {
  if (!tensor.defined()) return;
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  layout_ = {const_cast<void*>(impl.data()),
             impl.sizes().data(),
             impl.strides().data(),
             impl.dim(),
             impl.numel(),
             static_cast<int32_t>(impl.itemsize()),
             static_cast<Dtype>(tensor.scalar_type()),
             impl.is_contiguous()};
  new (held_.bytes) at::Tensor(std::move(tensor));
}

Tensor::operator const at::Tensor&() const noexcept {
  static const at::Tensor none;
  return defined() ? *std::launder(reinterpret_cast<const at::Tensor*>(held_.bytes)) : none;
}

void Tensor::hold_that_of(const Tensor& other) noexcept { new (held_.bytes) at::Tensor(torch_of(other)); }

void Tensor::release() noexcept { std::launder(reinterpret_cast<at::Tensor*>(held_.bytes))->~Tensor(); }

void Tensor::raise_type(Dtype wanted) const { fail("expected numbers of type ", wanted, ", not ", scalar_type()); }

void Tensor::raise_dim(int64_t dim) const {
  TORCH_CHECK_INDEX(false, "dimension ", dim, " is out of range for a tensor of ", layout_.dim);
}

std::string text_of(Dtype dtype) { return c10::toString(torch_of(dtype)); }

Tensor Tensor::operator[](int64_t index) const { return torch_of(*this)[index]; }
Tensor Tensor::flatten(int64_t first_dim) const { return torch_of(*this).flatten(first_dim); }
Tensor Tensor::narrow(int64_t dim, int64_t first, int64_t count) const {
  return torch_of(*this).narrow(dim, first, count);
}
Tensor Tensor::reshape(IntArrayRef sizes) const { return torch_of(*this).reshape(torch_of(sizes)); }
Tensor Tensor::select(int64_t dim, int64_t index) const { return torch_of(*this).select(dim, index); }
Tensor Tensor::squeeze(int64_t dim) const { return torch_of(*this).squeeze(dim); }
Tensor Tensor::to(Dtype dtype) const { return torch_of(*this).to(torch_of(dtype)); }
Tensor Tensor::transpose(int64_t one, int64_t other) const { return torch_of(*this).transpose(one, other); }
Tensor Tensor::unsqueeze(int64_t dim) const { return torch_of(*this).unsqueeze(dim); }
Tensor Tensor::view(IntArrayRef sizes) const { return torch_of(*this).view(torch_of(sizes)); }
Tensor Tensor::view(Dtype dtype) const { return torch_of(*this).view(torch_of(dtype)); }

std::vector<Tensor> Tensor::unbind() const {
  const std::vector<at::Tensor> all = torch_of(*this).unbind(0);
  return {all.begin(), all.end()};
}

Tensor Tensor::clone() const { return torch_of(*this).clone(); }
Tensor Tensor::contiguous_clone() const { return torch_of(*this).clone(at::MemoryFormat::Contiguous); }
bool Tensor::equal(const Tensor& other) const { return torch_of(*this).equal(other); }

const Tensor& Tensor::copy_(const Tensor& from) const {
  torch_of(*this).copy_(from);
  return *this;
}

const Tensor& Tensor::zero_() const {
  torch_of(*this).zero_();
  return *this;
}

int64_t element_size(Dtype dtype) { return static_cast<int64_t>(c10::elementSize(torch_of(dtype))); }

Tensor new_empty(IntArrayRef sizes, Dtype dtype) { return at::empty(torch_of(sizes), torch_of(dtype)); }

Tensor over_memory(std::shared_ptr<void> memory, IntArrayRef sizes, Dtype dtype) {
  void* const data = memory.get();
  return at::from_blob(data, torch_of(sizes), [memory = std::move(memory)](void*) {}, torch_of(dtype));
}

int64_t allowed_threads() { return at::get_num_threads(); }

}  // namespace twostep
