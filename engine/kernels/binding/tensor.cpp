// What kernels ask of torch's tensors. No other source includes torch's header of them, but those that register.

#include "base/tensor.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <new>
#include <utility>

#include "base/thread_pool.h"

namespace twostep {

static_assert(sizeof(at::Tensor) == sizeof(Tensor) && alignof(at::Tensor) == alignof(Tensor));

Tensor::Tensor() noexcept { new (storage_) at::Tensor(); }
Tensor::Tensor(const at::Tensor& tensor) noexcept { new (storage_) at::Tensor(tensor); }
Tensor::Tensor(const Tensor& other) noexcept : Tensor(static_cast<const at::Tensor&>(other)) {}
Tensor::Tensor(Tensor&& other) noexcept { new (storage_) at::Tensor(std::move(other.held())); }
Tensor::~Tensor() { held().~Tensor(); }

Tensor& Tensor::operator=(const Tensor& other) noexcept {
  held() = static_cast<const at::Tensor&>(other);
  return *this;
}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  held() = std::move(other.held());
  return *this;
}

at::Tensor& Tensor::held() noexcept { return *std::launder(reinterpret_cast<at::Tensor*>(storage_)); }
Tensor::operator const at::Tensor&() const noexcept {
  return *std::launder(reinterpret_cast<const at::Tensor*>(storage_));
}

namespace {

const at::Tensor& torch_of(const Tensor& tensor) { return tensor; }
constexpr at::ScalarType torch_of(Dtype dtype) { return static_cast<at::ScalarType>(dtype); }

template <class... Element>
constexpr bool kAreTorchs = ((torch_of(dtype_of<Element>()) == c10::CppTypeToScalarType<Element>::value) && ...);
static_assert(kAreTorchs<uint8_t, int8_t, int32_t, int64_t, float, double, bool, at::BFloat16>);

}  // namespace

std::ostream& operator<<(std::ostream& out, Dtype dtype) { return out << torch_of(dtype); }

bool Tensor::defined() const noexcept { return torch_of(*this).defined(); }
bool Tensor::is_same(const Tensor& other) const noexcept { return torch_of(*this).is_same(other); }
void Tensor::reset() noexcept { held().reset(); }

int64_t Tensor::dim() const { return torch_of(*this).dim(); }
int64_t Tensor::numel() const { return torch_of(*this).numel(); }
int64_t Tensor::size(int64_t dim) const { return torch_of(*this).size(dim); }
int64_t Tensor::stride(int64_t dim) const { return torch_of(*this).stride(dim); }
at::IntArrayRef Tensor::sizes() const { return torch_of(*this).sizes(); }
at::IntArrayRef Tensor::strides() const { return torch_of(*this).strides(); }
int64_t Tensor::element_size() const { return torch_of(*this).element_size(); }
Dtype Tensor::scalar_type() const { return static_cast<Dtype>(torch_of(*this).scalar_type()); }
bool Tensor::is_contiguous() const { return torch_of(*this).is_contiguous(); }

const void* Tensor::const_data_ptr() const { return torch_of(*this).const_data_ptr(); }
void* Tensor::mutable_data_ptr() const { return torch_of(*this).mutable_data_ptr(); }

void Tensor::check_type(Dtype wanted) const {
  TORCH_CHECK(scalar_type() == wanted, "expected numbers of type ", wanted, ", not ", scalar_type());
}

Tensor Tensor::operator[](int64_t index) const { return torch_of(*this)[index]; }
Tensor Tensor::contiguous() const { return torch_of(*this).contiguous(); }
Tensor Tensor::flatten(int64_t first_dim) const { return torch_of(*this).flatten(first_dim); }
Tensor Tensor::narrow(int64_t dim, int64_t first, int64_t count) const {
  return torch_of(*this).narrow(dim, first, count);
}
Tensor Tensor::reshape(at::IntArrayRef sizes) const { return torch_of(*this).reshape(sizes); }
Tensor Tensor::select(int64_t dim, int64_t index) const { return torch_of(*this).select(dim, index); }
Tensor Tensor::squeeze(int64_t dim) const { return torch_of(*this).squeeze(dim); }
Tensor Tensor::to(Dtype dtype) const { return torch_of(*this).to(torch_of(dtype)); }
Tensor Tensor::transpose(int64_t one, int64_t other) const { return torch_of(*this).transpose(one, other); }
Tensor Tensor::unsqueeze(int64_t dim) const { return torch_of(*this).unsqueeze(dim); }
Tensor Tensor::view(at::IntArrayRef sizes) const { return torch_of(*this).view(sizes); }
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

Tensor new_empty(at::IntArrayRef sizes, Dtype dtype) { return at::empty(sizes, torch_of(dtype)); }

Tensor over_memory(std::shared_ptr<void> memory, at::IntArrayRef sizes, Dtype dtype) {
  void* const data = memory.get();
  return at::from_blob(data, sizes, [memory = std::move(memory)](void*) {}, torch_of(dtype));
}

int64_t allowed_threads() { return at::get_num_threads(); }

}  // namespace twostep
