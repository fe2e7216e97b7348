// What torch passes and gets where kernels have a type of their own: its own tensors, and parts of a model inside of
// objects that it counts.

#pragma once

#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>

#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/array_ref.h"
#include "base/ref.h"
#include "base/tensor.h"

namespace twostep::binding {

// A part of a model, as Python holds it.
template <class T>
struct Held : torch::CustomClassHolder {
  Ref<T> part;

  explicit Held(Ref<T> part) : part(std::move(part)) {}
};

// Torch's type in place of T, and either from the other.
template <class T>
struct InTorch {
  using Type = T;
  static const T& from(const T& value) { return value; }
  static const T& to(const T& value) { return value; }
};

template <>
struct InTorch<Tensor> {
  using Type = at::Tensor;
  static Tensor from(const Type& value) { return value; }
  static const Type& to(const Tensor& value) { return value; }
};

template <>
struct InTorch<IntArrayRef> {
  using Type = at::IntArrayRef;
  static IntArrayRef from(Type value) { return value; }
};

template <class T>
struct InTorch<Ref<T>> {
  using Type = c10::intrusive_ptr<Held<T>>;
  static Ref<T> from(const Type& value) { return value->part; }
  static Type to(Ref<T> value) { return c10::make_intrusive<Held<T>>(std::move(value)); }
};

template <class T>
struct InTorch<std::optional<T>> {
  using Type = std::optional<typename InTorch<T>::Type>;
  static std::optional<T> from(const Type& value) {
    return value ? std::optional<T>(InTorch<T>::from(*value)) : std::nullopt;
  }
  static Type to(const std::optional<T>& value) { return value ? Type(InTorch<T>::to(*value)) : std::nullopt; }
};

template <class T>
struct InTorch<std::vector<T>> {
  using Type = std::vector<typename InTorch<T>::Type>;
  static std::vector<T> from(const Type& value) {
    std::vector<T> all;
    for (const auto& each : value) all.push_back(InTorch<T>::from(each));
    return all;
  }
  static Type to(const std::vector<T>& value) {
    Type all;
    for (const auto& each : value) all.push_back(InTorch<T>::to(each));
    return all;
  }
};

template <class... T>
struct InTorch<std::tuple<T...>> {
  using Type = std::tuple<typename InTorch<T>::Type...>;
  static Type to(const std::tuple<T...>& value) {
    return std::apply([](const T&... each) { return Type(InTorch<T>::to(each)...); }, value);
  }
};

template <class T>
using Bare = std::remove_cvref_t<T>;
template <class T>
using TorchOf = typename InTorch<Bare<T>>::Type;
template <class T>
using TorchArg = std::conditional_t<std::is_lvalue_reference_v<T>, const TorchOf<T>&, TorchOf<T>>;

// What a function of kernels is to torch: `call` has torch's types.
template <auto kFunction, class Signature = decltype(+kFunction)>
struct Bound;

template <auto kFunction, class Result, class... Args>
struct Bound<kFunction, Result (*)(Args...)> {
  static auto call(TorchArg<Args>... args) {
    if constexpr (std::is_void_v<Result>) kFunction(InTorch<Bare<Args>>::from(args)...);
    else return InTorch<Bare<Result>>::to(kFunction(InTorch<Bare<Args>>::from(args)...));
  }
};

template <auto kFunction>
constexpr auto bound() {
  return &Bound<kFunction>::call;
}

// How torch makes an object of a part: by its constructor of these arguments.
template <class T, class... Args>
auto made_of() {
  return torch::init(
      [](TorchOf<Args>... args) { return InTorch<Ref<T>>::to(std::make_shared<T>(InTorch<Args>::from(args)...)); });
}

}  // namespace twostep::binding
