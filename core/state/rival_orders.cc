// SPDX-License-Identifier: Apache-2.0

#include "core/state/rival_orders.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string_view>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

constexpr size_t kMaxWork = size_t{1} << 26;  // numbers of parameters in all rivals together

// The child modules of one module, in the model's order, each with the indices of its parameters.
struct Children {
  std::vector<std::string_view> names;
  std::vector<std::vector<size_t>> members;
};

bool IsNumber(std::string_view text) { return std::ranges::all_of(text, IsDigit); }

class Rivals {
 public:
  Rivals(std::span<const OwnableParameter> parameters,
         const std::function<bool(const std::vector<size_t>&)>& rival)
      : parameters_(parameters), rival_(rival), model_(parameters.size()) {
    std::iota(model_.begin(), model_.end(), size_t{0});
  }

  bool Run() {
    std::vector<size_t> order(model_.rbegin(), model_.rend());
    Offer(order);
    order = model_;
    std::ranges::sort(order, {}, [&](size_t i) -> std::string_view { return parameters_[i].name; });
    Offer(order);
    for (const auto& [prefix, children] : Modules()) {
      if (!IsNumber(children.names[0])) OfferMoves(children);
    }
    return done_ || work_ <= kMaxWork;
  }

 private:
  // Every module above the first number in a name, by the start of its members' names.
  std::map<std::string_view, Children> Modules() const {
    std::map<std::string_view, Children> out;
    std::map<std::string_view, size_t> numbers;  // of a child among its siblings, by its start
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const std::string_view name = parameters_[i].name;
      size_t begin = 0;
      for (size_t dot; (dot = name.find('.', begin)) != std::string_view::npos; begin = dot + 1) {
        const std::string_view child = name.substr(begin, dot - begin);
        Children& siblings = out[name.substr(0, begin)];
        const auto [number, added] = numbers.emplace(name.substr(0, dot), siblings.names.size());
        if (added) {
          siblings.names.push_back(child);
          siblings.members.emplace_back();
        }
        siblings.members[number->second].push_back(i);
        if (IsNumber(child)) break;
      }
    }
    return out;
  }

  void OfferMoves(const Children& children) {
    std::vector<std::vector<size_t>> moving;
    std::vector<size_t> places;
    for (const auto& members : children.members) {
      const auto is_matrix = [&](size_t i) { return parameters_[i].shape.size() > 1; };
      if (std::ranges::none_of(members, is_matrix)) continue;
      moving.push_back(members);
      places.insert(places.end(), members.begin(), members.end());
    }
    const size_t count = moving.size();
    std::ranges::sort(places);
    const auto offer = [&](const std::vector<size_t>& siblings) {
      std::vector<size_t> order = model_;
      size_t k = 0;
      for (const size_t child : siblings) {
        for (const size_t i : moving[child]) order[places[k++]] = i;
      }
      Offer(order);
    };
    std::vector<size_t> siblings(count);
    std::iota(siblings.begin(), siblings.end(), size_t{0});
    offer({siblings.rbegin(), siblings.rend()});
    for (size_t from = 0; from < count; ++from) {
      for (size_t to = 0; to < count && !IsOver(); ++to) {
        std::vector<size_t> moved = siblings;
        moved.erase(moved.begin() + static_cast<std::ptrdiff_t>(from));
        moved.insert(moved.begin() + static_cast<std::ptrdiff_t>(to), from);
        offer(moved);
        moved = siblings;
        std::swap(moved[from], moved[to]);
        offer(moved);
      }
    }
  }

  bool IsOver() const { return done_ || work_ > kMaxWork; }

  void Offer(const std::vector<size_t>& order) {
    if (IsOver()) return;
    work_ += order.size();
    if (order != model_ && work_ <= kMaxWork) done_ = rival_(order);
  }

  std::span<const OwnableParameter> parameters_;
  const std::function<bool(const std::vector<size_t>&)>& rival_;
  std::vector<size_t> model_;  // 0, 1, 2, ...
  size_t work_ = 0;
  bool done_ = false;
};

}  // namespace

bool ForEachRivalOrder(std::span<const OwnableParameter> parameters,
                       const std::function<bool(const std::vector<size_t>&)>& rival) {
  return Rivals(parameters, rival).Run();
}

}  // namespace ckptfs
