// SPDX-License-Identifier: Apache-2.0
//
// `ckptfs read` answers a program that has no mount, request by request, on its
// standard input and output:
//
//     request = "file" SP offset SP length SP path LF      bytes of a file of the view
//             | "step" LF                                  groups and documents, as JSON
//             | "tensor" SP document SP tensor LF          bytes of a document's tensor
//     reply   = count LF count bytes | "-" text LF         the text says why not
//
// Numbers are decimal.  A file's reply is short at its end alone; it has at most
// kLargestReply bytes.  The end of the input ends it.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/store/model_of.h"
#include "core/view/plan_reader.h"
#include "core/view/view_set.h"
#include "formats/registry.h"
#include "mount/commands/command_set.h"
#include "mount/commands/step_access.h"
#include "mount/options.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kLargestReply = uint64_t{16} << 20;

struct ReadFlags {
  std::string step;
  std::string layout;
  std::string store;
  std::vector<std::string> roots;
  bool newest = false;
};

std::string Hex(std::string_view bytes) {
  std::string out;
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

// Elements from a tensor's first to its last in memory; nothing says that they lie
// without gaps.
Result<uint64_t> SpanOf(const StoredTensor& tensor) {
  uint64_t last = 0;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    if (tensor.shape[d] == 0) return uint64_t{0};
    CKPT_ASSIGN_OR_RETURN(const uint64_t way, CheckedMul(tensor.shape[d] - 1, tensor.strides[d], "a tensor's span"));
    CKPT_ASSIGN_OR_RETURN(last, CheckedAdd(last, way, "a tensor's span"));
  }
  return CheckedAdd(last, 1, "a tensor's span");
}

class Answers {
 public:
  Answers(const Step& step, std::shared_ptr<const ViewSet> views, BlobReader& blobs)
      : model_(step.model), id_(step.record.id), views_(std::move(views)), blobs_(blobs) {}

  Result<std::span<const std::byte>> To(const std::string& line) {
    std::istringstream words(line);
    std::string what;
    words >> what;
    if (what == "step") return Describe();
    uint64_t first = 0;
    uint64_t second = 0;
    if (words >> first >> second) {
      if (what == "tensor") return ReadTensor(first, second);
      std::string path;
      if (what == "file" && words.get() == ' ' && std::getline(words, path)) {
        return ReadFile(path, first, second);
      }
    }
    return Fail(ErrorCode::kInvalid, "this is not a request");
  }

 private:
  Result<std::span<const std::byte>> ReadFile(const std::string& path, uint64_t offset,
                                              uint64_t length) {
    if (path != path_) {
      CKPT_ASSIGN_OR_RETURN(plan_, views_->MakePlan(path));
      path_ = path;
    }
    bytes_.resize(std::min(length, kLargestReply));
    const PlanReader reader(plan_, model_, blobs_);
    CKPT_ASSIGN_OR_RETURN(const size_t count, reader.ReadParallel(offset, bytes_));
    return std::span<const std::byte>(bytes_).first(count);
  }

  Result<std::span<const std::byte>> ReadTensor(uint64_t document, uint64_t number) {
    if (document >= model_.documents.size() ||
        number >= model_.documents[document].tensors.size()) {
      return Fail(ErrorCode::kNotFound, "there is no such tensor");
    }
    const StoredTensor& tensor = model_.documents[document].tensors[number];
    CKPT_ASSIGN_OR_RETURN(const uint64_t elements, SpanOf(tensor));
    CKPT_ASSIGN_OR_RETURN(const uint64_t size,
                          CheckedMul(elements, ByteWidth(tensor.dtype), "a tensor's bytes"));
    if (size > kLargestReply) return Fail(ErrorCode::kUnsupported, "the tensor is too large");
    bytes_.resize(size);
    if (size > 0) CKPT_RETURN_IF_ERROR(blobs_.Read(tensor.blob, tensor.offset, bytes_));
    return std::span<const std::byte>(bytes_);
  }

  Result<std::span<const std::byte>> Describe() {
    Json groups = Json::array();
    for (const Group& group : model_.groups) {
      Json names = Json::array();
      for (const ParameterIndex p : group.parameters) names.push_back(model_.parameter(p).name);
      groups.push_back({{"optimizer", group.optimizer},
                        {"parameters", std::move(names)},
                        {"pickle", Hex(group.hyper_parameters)}});
    }
    Json documents = Json::array();
    for (const Document& document : model_.documents) {
      Json tensors = Json::array();
      for (const StoredTensor& tensor : document.tensors) {
        tensors.push_back({{"dtype", TorchName(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"strides", tensor.strides}});
      }
      documents.push_back({{"key", document.key},
                           {"scope", document.scope},
                           {"pickle", Hex(document.pickle)},
                           {"tensors", std::move(tensors)}});
    }
    text_ = Json({{"id", id_}, {"groups", std::move(groups)}, {"documents", std::move(documents)}})
                .dump(-1, ' ', false, Json::error_handler_t::replace);
    return std::as_bytes(std::span<const char>(text_));
  }

  const StepModel& model_;
  const std::string id_;
  const std::shared_ptr<const ViewSet> views_;
  BlobReader& blobs_;
  std::string path_;  // whose plan `plan_` is
  Plan plan_;
  std::vector<std::byte> bytes_;
  std::string text_;
};

Status WriteOut(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(STDOUT_FILENO, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail(ErrnoError(errno, "standard output"));
    bytes = bytes.subspan(static_cast<size_t>(n));
  }
  return {};
}

Status Reply(const Result<std::span<const std::byte>>& answer) {
  std::string head;
  if (answer) {
    head = StrCat(answer->size(), "\n");
  } else {
    head = StrCat("-", answer.error().message, "\n");
    std::replace(head.begin(), head.end() - 1, '\n', ' ');
  }
  CKPT_RETURN_IF_ERROR(WriteOut(std::as_bytes(std::span<const char>(head))));
  return answer ? WriteOut(*answer) : Status{};
}

// RUN/N, N a number: of the attempts that were saved as step N the newest.
Result<StepRecord> NewestAttempt(Store& store, std::string_view name) {
  CKPT_ASSIGN_OR_RETURN(const StepReference asked, ParseStepReference(name));
  CKPT_ASSIGN_OR_RETURN(const uint32_t number, ParseCount(asked.id));
  CKPT_ASSIGN_OR_RETURN(std::vector<StepRecord> steps, store.Steps(asked.run));
  const std::string begin = asked.id + "-";
  StepRecord* newest = nullptr;
  uint32_t newest_attempt = 0;
  for (StepRecord& step : steps) {
    if (step.iteration != number) continue;
    uint32_t attempt = 0;
    if (step.id.starts_with(begin)) {
      const auto parsed = ParseCount(std::string_view(step.id).substr(begin.size()));
      if (parsed) attempt = *parsed;
    }
    if (step.id != asked.id && attempt == 0) continue;
    if (newest != nullptr && attempt < newest_attempt) continue;
    newest = &step;
    newest_attempt = attempt;
  }
  if (newest == nullptr) return store.Resolve(asked.run, asked.id);  // which says why not
  return std::move(*newest);
}

Status RunRead(const ReadFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const Layout layout, Layout::Parse(options.layout));
  CKPT_ASSIGN_OR_RETURN(RootMap roots, ParseRoots(options.roots));
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const StepRecord record, options.newest
                                                     ? NewestAttempt(*store, options.step)
                                                     : ResolveStep(*store, options.step));
  CKPT_ASSIGN_OR_RETURN(const auto step, store->Load(record));
  const auto blobs = BlobReader::Create(step->model, ReaderOptions(std::move(roots)));
  const auto views = ViewSet::Open(ModelOf(step), layout, MakeViewFormats());
  if (!views->offer().Any()) return Fail(views->offer().Refusal());
  Answers answers(*step, views, *blobs);
  for (std::string line; std::getline(std::cin, line);) {
    CKPT_RETURN_IF_ERROR(Reply(answers.To(line)));
  }
  return {};
}

}  // namespace

void AddReadCommand(CommandSet& commands) {
  auto options = std::make_shared<ReadFlags>();
  Command& command =
      commands.Add("read", "Answer a program's reads of a view on standard input and output");
  command.Add("STEP", options->step, "RUN/ID").Required();
  command.Add("LAYOUT", options->layout, "Such as tp1").Required().Check(Checked(Layout::Parse));
  AddStoreOption(command, options->store);
  command.Add("--newest", options->newest, "RUN/N: of the attempts that were saved as step N the newest");
  AddRootOption(command, options->roots);
  command.body = [options] { return RunRead(*options); };
}

}  // namespace ckptfs
