// SPDX-License-Identifier: Apache-2.0

#include "core/view/view_set.h"

#include <algorithm>
#include <utility>

#include "core/base/edit_distance.h"
#include "core/base/strings.h"
#include "core/dialect/translate.h"

namespace ckptfs {
namespace {

// With the steps under other names that views show.
uint64_t BytesOf(const LayoutOffer& offer, std::span<const std::shared_ptr<const View>> views,
                 const StepModel& step) {
  uint64_t bytes = sizeof(ViewSet) + sizeof(LayoutOffer) + offer.name.size();
  for (const LayoutOffer::Answer& answer : offer.answers) {
    bytes += sizeof(answer) + answer.format.size();
    if (answer.refusal) bytes += answer.refusal->message.size() + answer.refusal->needs.size();
    for (const std::string& line : answer.left_out) bytes += sizeof(std::string) + line.size();
  }
  const StepModel* counted = &step;  // the stored one is not the view set's
  for (const auto& view : views) {
    bytes += view->MemoryBytes();
    if (view->step().get() == counted || view->step().get() == &step) continue;
    counted = view->step().get();
    bytes += HeapBytesOf(*counted);
  }
  return bytes;
}

}  // namespace

tl::unexpected<Error> NotInView(std::string_view path) {
  return Fail(ErrorCode::kNotFound, StrCat("no '", path, "' in the view"));
}

Reading GuessReading(std::string_view file_name) {
  for (const std::string_view suffix : {".pt", ".pth", ".bin", ".ckpt"}) {
    if (file_name.ends_with(suffix)) return Reading::kCopied;
  }
  return file_name.ends_with(".safetensors") ? Reading::kMapped : Reading::kRandom;
}

std::string LayoutOffer::Answer::Text() const {
  return refusal ? StrCat("no: ", refusal->message) : "yes";
}

bool LayoutOffer::Any() const {
  return std::any_of(answers.begin(), answers.end(),
                     [](const Answer& answer) { return !answer.refusal; });
}

std::string LayoutOffer::Cause::Text() const {
  std::string text;
  for (const std::string& format : formats) text += StrCat(text.empty() ? "" : ", ", format);
  return StrCat(text, ": ", error.message);
}

std::vector<LayoutOffer::Cause> LayoutOffer::Causes() const {
  std::vector<Cause> causes;
  for (const Answer& answer : answers) {
    if (!answer.refusal) continue;
    const auto same = std::find_if(causes.begin(), causes.end(), [&](const Cause& cause) {
      return cause.error.message == answer.refusal->message;
    });
    if (same != causes.end()) {
      same->formats.push_back(answer.format);
      continue;
    }
    causes.push_back({{answer.format}, *answer.refusal});
    causes.back().error.layout = name;
  }
  return causes;
}

Error LayoutOffer::Refusal() const {
  Error error{ErrorCode::kUnsupported, StrCat("no format can show layout ", name)};
  error.layout = name;
  size_t most = 0;
  for (const Cause& cause : Causes()) {
    error.message += StrCat("; ", cause.Text());
    if (cause.formats.size() <= most) continue;
    most = cause.formats.size();
    error.parameter = cause.error.parameter;
    error.needs = cause.error.needs;
  }
  return error;
}

ViewSet::ViewSet(std::shared_ptr<const ShownState> shown, std::shared_ptr<const LayoutOffer> offer,
                 std::vector<std::shared_ptr<const View>> views)
    : shown_(std::move(shown)),
      offer_(std::move(offer)),
      views_(std::move(views)),
      memory_bytes_(shown_->MemoryBytes() + BytesOf(*offer_, views_, shown_->step())) {}

std::shared_ptr<const ViewSet> ViewSet::Open(std::shared_ptr<const StepModel> step,
                                             const Layout& layout,
                                             std::span<const std::unique_ptr<ViewFormat>> formats) {
  LayoutOffer offer;
  offer.layout = layout;
  offer.name = layout.ToString();
  const auto shown = ShownState::Of(std::move(step), layout);
  std::vector<std::shared_ptr<const View>> views;
  for (const auto& format : formats) {
    auto view = format->Open(shown);
    offer.answers.push_back({std::string(format->name()), std::nullopt, {}});
    if (view) {
      offer.answers.back().left_out = (*view)->LeftOut();
      views.push_back(*std::move(view));
    } else {
      offer.answers.back().refusal = std::move(view).error();
    }
  }
  return std::shared_ptr<const ViewSet>(
      new ViewSet(shown, std::make_shared<const LayoutOffer>(std::move(offer)), std::move(views)));
}

Result<const View*> ViewSet::OwnerOf(std::string_view path) const {
  const std::string_view top = path.substr(0, path.find('/'));
  for (const auto& view : views_) {
    const auto entry = view->Find(top);
    if (entry && entry->name == top) return view.get();
    if (!entry && entry.error().code != ErrorCode::kNotFound) return Fail(entry.error());
  }
  return NotInView(path);
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
  if (path.substr(path.rfind('/') + 1) != entry.name) return NotInView(path);
  return entry;
}

namespace {

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

// "rank" of rank12; empty if it is not a word and a number.
std::string_view WordOfNumbered(std::string_view name) {
  const size_t digits = name.find_first_of("0123456789");
  return digits != name.npos && IsNumber(name.substr(digits)) ? name.substr(0, digits) : "";
}

// "; there are rank0 to rank3" for another rank, "; do you mean deepspeed?" for what is near; empty
// if nothing is like it.
std::string Alternatives(std::string_view name, const std::vector<std::string>& known) {
  constexpr size_t kTypingErrors = 2;
  if (const std::string_view word = WordOfNumbered(name); !word.empty()) {
    const auto count = std::ranges::count_if(known, [&](const std::string& one) {
      return one.starts_with(word) && IsNumber(std::string_view(one).substr(word.size()));
    });
    if (count > 0) return StrCat("; there are ", word, "0 to ", word, count - 1);
  }
  return MeantText(name, known, kTypingErrors);
}

}  // namespace

// Names of the directory that is there, and the first name of the path that is not.
std::pair<std::vector<std::string>, std::string> ViewSet::NamesBeside(std::string_view path) const {
  size_t begin = 0;
  for (size_t end = path.find('/'); end != path.npos; end = path.find('/', end + 1)) {
    if (!Find(path.substr(0, end))) break;
    begin = end + 1;
  }
  std::vector<std::string> names;
  if (const auto entries = List(path.substr(0, begin == 0 ? 0 : begin - 1))) {
    for (const ViewEntry& entry : *entries) names.push_back(entry.name);
  }
  if (begin == 0) {
    for (const LayoutOffer::Answer& answer : offer_->answers) {
      if (answer.refusal) names.push_back(answer.format);
    }
  }
  return {std::move(names), std::string(path.substr(begin, path.find('/', begin) - begin))};
}

Error ViewSet::WhyAbsent(std::string_view path) const {
  std::string message = StrCat("no such part of the view: '", path, "'");
  const std::string_view top = path.substr(0, path.find('/'));
  const auto absent = [&](ErrorCode code, std::string text) {
    Error error{code, std::move(text)};
    error.layout = offer_->name;
    return error;
  };
  for (const LayoutOffer::Cause& cause : offer_->Causes()) {
    for (const std::string& format : cause.formats) {
      if (top != format && WordOfNumbered(top) != format) continue;
      Error error =
          Error(cause.error).WithContext(StrCat("layout ", offer_->name, " has no ", top));
      error.code = ErrorCode::kUnsupported;
      return error;
    }
  }
  const auto [names, missing] = NamesBeside(path);
  const std::string meant = Alternatives(missing, names);
  if (!meant.empty()) return absent(ErrorCode::kNotFound, message + meant);
  if (OwnerOf(path)) return absent(ErrorCode::kNotFound, message);
  bool refused = false;
  for (const LayoutOffer::Cause& cause : offer_->Causes()) {
    refused = true;
    message += StrCat("; ", cause.Text());
  }
  return absent(refused ? ErrorCode::kUnsupported : ErrorCode::kNotFound, message);
}

Result<ShownPlan> ViewSet::MakePlan(std::string_view file) const {
  CKPT_ASSIGN_OR_RETURN(const View* const owner, OwnerOf(file));
  CKPT_ASSIGN_OR_RETURN(Plan plan, owner->MakePlan(file));
  CKPT_RETURN_IF_ERROR(plan.Validate(*owner->step()));
  return ShownPlan{std::move(plan), owner->step()};
}

}  // namespace ckptfs
