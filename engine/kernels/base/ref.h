// What parts of a model are held by: several may hold one.

#pragma once

#include <memory>
#include <optional>

namespace twostep {

template <class T>
using Ref = std::shared_ptr<T>;

}  // namespace twostep
