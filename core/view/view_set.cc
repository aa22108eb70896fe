// SPDX-License-Identifier: Apache-2.0

#include "core/view/view_set.h"

#include <algorithm>
#include <utility>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

Error NoSuch(std::string_view path) {
  return Error{ErrorCode::kNotFound, StrCat("no '", path, "' in the view")};
}

uint64_t BytesOf(const LayoutOffer& offer, std::span<const std::shared_ptr<const View>> views) {
  uint64_t bytes = sizeof(ViewSet) + sizeof(LayoutOffer) + offer.name.size();
  for (const LayoutOffer::Answer& answer : offer.answers) {
    bytes += sizeof(answer) + answer.format.size() + answer.refusal.size();
  }
  for (const auto& view : views) bytes += view->MemoryBytes();
  return bytes;
}

}  // namespace

Reading GuessReading(std::string_view file_name) {
  for (const std::string_view suffix : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (file_name.ends_with(suffix)) return Reading::kCopied;
  }
  return file_name.ends_with(".safetensors") ? Reading::kMapped : Reading::kRandom;
}

std::string LayoutOffer::Answer::Text() const {
  return refusal.empty() ? "yes" : StrCat("no: ", refusal);
}

bool LayoutOffer::Any() const {
  return std::any_of(answers.begin(), answers.end(),
                     [](const Answer& answer) { return answer.refusal.empty(); });
}

std::string LayoutOffer::Cause::Text() const {
  std::string text;
  for (const std::string& format : formats) text += StrCat(text.empty() ? "" : ", ", format);
  return StrCat(text, ": ", reason);
}

std::vector<LayoutOffer::Cause> LayoutOffer::Causes() const {
  std::vector<Cause> causes;
  for (const Answer& answer : answers) {
    if (answer.refusal.empty()) continue;
    const auto same = std::find_if(causes.begin(), causes.end(), [&](const Cause& cause) {
      return cause.reason == answer.refusal;
    });
    if (same != causes.end()) {
      same->formats.push_back(answer.format);
    } else {
      causes.push_back({{answer.format}, answer.refusal, answer.code});
    }
  }
  return causes;
}

Error LayoutOffer::Refusal() const {
  std::string message = StrCat("no format can show layout ", name);
  for (const Cause& cause : Causes()) message += StrCat("; ", cause.Text());
  return Error{ErrorCode::kUnsupported, std::move(message)};
}

namespace {

// Whether the clause says what to do.
bool IsImperative(std::string_view clause) {
  for (const std::string_view word : {"add ", "give ", "remove ", "write ", "set ", "use ", "declare "}) {
    if (clause.starts_with(word)) return true;
  }
  return clause.find('`') != std::string_view::npos || clause.find("--") != std::string_view::npos;
}

}  // namespace

RefusalDetail DetailOf(std::string_view reason) {
  RefusalDetail detail;
  const size_t open = reason.find('\'');
  const size_t close = open == std::string_view::npos ? open : reason.find("': ", open + 1);
  const bool named = close != std::string_view::npos &&
                     (open == 0 || reason.substr(0, open).ends_with("parameter "));
  if (named) detail.parameter = reason.substr(open + 1, close - open - 1);
  for (size_t end = reason.size(); end != std::string_view::npos && detail.needs.empty();) {
    const size_t begin = end == 0 ? std::string_view::npos : reason.rfind("; ", end - 1);
    const size_t from = begin == std::string_view::npos ? 0 : begin + 2;
    if (IsImperative(reason.substr(from, end - from))) detail.needs = reason.substr(from, end - from);
    end = begin;
  }
  return detail;
}

ViewSet::ViewSet(std::shared_ptr<const StepModel> step, std::shared_ptr<const LayoutOffer> offer,
                 std::vector<std::shared_ptr<const View>> views)
    : step_(std::move(step)),
      offer_(std::move(offer)),
      views_(std::move(views)),
      memory_bytes_(BytesOf(*offer_, views_)) {}

std::shared_ptr<const ViewSet> ViewSet::Open(std::shared_ptr<const StepModel> step,
                                             const Layout& layout,
                                             std::span<const std::unique_ptr<ViewFormat>> formats) {
  LayoutOffer offer;
  offer.layout = layout;
  offer.name = layout.ToString();
  std::vector<std::shared_ptr<const View>> views;
  for (const auto& format : formats) {
    auto view = format->Open(step, layout);
    offer.answers.push_back({std::string(format->name()), view ? "" : view.error().message,
                             view ? ErrorCode::kUnsupported : view.error().code});
    if (view) views.push_back(*std::move(view));
  }
  return std::shared_ptr<const ViewSet>(new ViewSet(
      std::move(step), std::make_shared<const LayoutOffer>(std::move(offer)), std::move(views)));
}

Result<const View*> ViewSet::OwnerOf(std::string_view path) const {
  const std::string_view top = path.substr(0, path.find('/'));
  for (const auto& view : views_) {
    const auto entry = view->Find(top);
    if (entry && entry->name == top) return view.get();
    if (!entry && entry.error().code != ErrorCode::kNotFound) return Fail(entry.error());
  }
  return Fail(NoSuch(path));
}

Result<std::vector<ViewEntry>> ViewSet::ListTop() const {
  std::vector<ViewEntry> all;
  for (auto view = views_.begin(); view != views_.end(); ++view) {
    auto entries = (*view)->List("");
    if (!entries && entries.error().code == ErrorCode::kNotFound) continue;
    if (!entries) return entries;
    for (ViewEntry& entry : *entries) {
      const bool taken = std::any_of(views_.begin(), view, [&](const auto& earlier) {
        return earlier->Find(entry.name).has_value();
      });
      if (!taken) all.push_back(std::move(entry));
    }
  }
  return all;
}

Result<std::vector<ViewEntry>> ViewSet::List(std::string_view directory) const {
  if (directory.empty()) return ListTop();
  CKPT_ASSIGN_OR_RETURN(const View* const owner, OwnerOf(directory));
  return owner->List(directory);
}

Result<ViewEntry> ViewSet::Find(std::string_view path) const {
  CKPT_ASSIGN_OR_RETURN(const View* const owner, OwnerOf(path));
  CKPT_ASSIGN_OR_RETURN(ViewEntry entry, owner->Find(path));
  // The name in its one spelling.
  if (path.substr(path.rfind('/') + 1) != entry.name) return Fail(NoSuch(path));
  return entry;
}

// "rank0 to rank3" of a word with a number: the entries at the top that are that word with another;
// empty if there are none.
std::string ViewSet::NumberedLike(std::string_view name) const {
  const size_t digits = name.find_first_of("0123456789");
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  };
  if (digits == 0 || digits == name.npos || !is_number(name.substr(digits))) return "";
  const auto entries = ListTop();
  if (!entries) return "";
  const std::string_view word = name.substr(0, digits);
  const auto count = std::ranges::count_if(*entries, [&](const ViewEntry& entry) {
    return entry.name.starts_with(word) && is_number(entry.name.substr(digits));
  });
  return count == 0 ? "" : StrCat(word, "0 to ", word, count - 1);
}

Error ViewSet::WhyAbsent(std::string_view path) const {
  std::string message = StrCat("no such part of the view: '", path, "'");
  if (OwnerOf(path)) return Error{ErrorCode::kNotFound, std::move(message)};
  if (const std::string others = NumberedLike(path.substr(0, path.find('/'))); !others.empty()) {
    return Error{ErrorCode::kNotFound, StrCat(message, "; there are ", others)};
  }
  bool refused = false;
  for (const LayoutOffer::Cause& cause : offer_->Causes()) {
    refused = true;
    message += StrCat("; ", cause.Text());
  }
  return Error{refused ? ErrorCode::kUnsupported : ErrorCode::kNotFound, std::move(message)};
}

Result<Plan> ViewSet::MakePlan(std::string_view file) const {
  CKPT_ASSIGN_OR_RETURN(const View* const owner, OwnerOf(file));
  CKPT_ASSIGN_OR_RETURN(Plan plan, owner->MakePlan(file));
  CKPT_RETURN_IF_ERROR(plan.Validate(*step_));
  return plan;
}

}  // namespace ckptfs
