// SPDX-License-Identifier: Apache-2.0

#include "mount/control/step_answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/checked_math.h"
#include "core/base/strings.h"
#include "core/store/model_of.h"
#include "core/view/plan_reader.h"
#include "formats/registry.h"

namespace ckptfs {
namespace {

using Json = nlohmann::json;

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
    CKPT_ASSIGN_OR_RETURN(const uint64_t way,
                          CheckedMul(tensor.shape[d] - 1, tensor.strides[d], "a tensor's span"));
    CKPT_ASSIGN_OR_RETURN(last, CheckedAdd(last, way, "a tensor's span"));
  }
  return CheckedAdd(last, 1, "a tensor's span");
}

// [optimizer, kind, parameter] of the states that a rank's files do not name by their optimizer,
// of what several optimizers have.
Json FirstOwners(const ShownState& shown) {
  const StepModel& model = shown.step();
  std::map<ParameterIndex, std::set<std::string>> optimizers;
  for (const Group& group : model.groups) {
    for (const ParameterIndex p : group.parameters) optimizers[p].insert(group.optimizer);
  }
  Json owners = Json::array();
  for (const auto& [parameter, having] : optimizers) {
    if (having.size() < 2) continue;
    for (const ShownAtom& held : shown.AtomsOf(parameter)) {
      const Atom& atom = model.atom(held.atom);
      if (atom.kind == "weight" || !held.first) continue;
      owners.push_back({atom.optimizer, atom.kind, model.parameter(parameter).name});
    }
  }
  return owners;
}

}  // namespace

StepAnswers::StepAnswers(std::shared_ptr<const Step> step, std::shared_ptr<const ViewSet> views,
                         std::unique_ptr<BlobReader> blobs)
    : step_(std::move(step)), views_(std::move(views)), blobs_(std::move(blobs)) {}

Result<std::unique_ptr<StepAnswers>> StepAnswers::Open(std::shared_ptr<const Step> step,
                                                       const Layout& layout,
                                                       BlobReader::Options reading) {
  reading.open_roots = step->roots;
  auto blobs = BlobReader::Create(step->model, std::move(reading));
  auto views = ViewSet::Open(ModelOf(step), layout, MakeViewFormats());
  if (!views->offer().Any()) return Fail(views->offer().Refusal());
  return std::unique_ptr<StepAnswers>(
      new StepAnswers(std::move(step), std::move(views), std::move(blobs)));
}

StepAnswers::Answer StepAnswers::To(const std::string& request) {
  std::istringstream words(request);
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
  return Fail(ErrorCode::kInvalid, "the message is not a request");
}

std::string StepAnswers::HeadOf(const Answer& answer) {
  if (answer) return StrCat(answer->size(), "\n");
  std::string head = StrCat("-", answer.error().message, "\n");
  std::replace(head.begin(), head.end() - 1, '\n', ' ');
  return head;
}

StepAnswers::Answer StepAnswers::ReadFile(const std::string& path, uint64_t offset,
                                          uint64_t length) {
  if (path != path_) {
    CKPT_ASSIGN_OR_RETURN(shown_, views_->MakePlan(path));
    path_ = path;
  }
  bytes_.resize(std::min(length, kLargestReply));
  const PlanReader reader(shown_.plan, *shown_.step, *blobs_);
  CKPT_ASSIGN_OR_RETURN(const size_t count, reader.ReadParallel(offset, bytes_));
  return std::span<const std::byte>(bytes_).first(count);
}

StepAnswers::Answer StepAnswers::ReadTensor(uint64_t document, uint64_t number) {
  const std::vector<Document>& documents = step_->model.documents;
  if (document >= documents.size() || number >= documents[document].tensors.size()) {
    return Fail(ErrorCode::kNotFound, "there is no such tensor");
  }
  const StoredTensor& tensor = documents[document].tensors[number];
  if (tensor.atom) return ReadAtom(*tensor.atom);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, SpanOf(tensor));
  CKPT_ASSIGN_OR_RETURN(const uint64_t size,
                        CheckedMul(elements, ByteWidth(tensor.dtype), "a tensor's bytes"));
  if (size > kLargestReply) return Fail(ErrorCode::kUnsupported, "the tensor is too large");
  bytes_.resize(size);
  if (size > 0) CKPT_RETURN_IF_ERROR(blobs_->Read(tensor.blob, tensor.offset, bytes_));
  return std::span<const std::byte>(bytes_);
}

StepAnswers::Answer StepAnswers::ReadAtom(AtomIndex index) {
  const Atom& atom = step_->model.atom(index);
  CKPT_ASSIGN_OR_RETURN(const uint64_t elements, ElementCount(atom.shape));
  CKPT_ASSIGN_OR_RETURN(const uint64_t size, ByteCount(atom.shape, atom.dtype));
  if (size > kLargestReply) return Fail(ErrorCode::kUnsupported, "the tensor is too large");
  PlanBuilder plan;
  auto local = std::make_shared<const LocalTensor>(WholeTensor(atom.shape));
  plan.Atom(index, std::move(local), 0, elements, atom.dtype);
  const Plan made = std::move(plan).Finish();
  bytes_.resize(size);
  const PlanReader reader(made, step_->model, *blobs_);
  CKPT_ASSIGN_OR_RETURN(const size_t count, reader.ReadParallel(0, bytes_));
  return std::span<const std::byte>(bytes_).first(count);
}

namespace {

// Where the state dict that DCP saved had the model and the optimizers, by their labels; null of a
// step that was saved otherwise.
Json SpellingOf(const StepModel& model) {
  const auto& keys = model.facts.keys;
  if (!keys) return nullptr;
  Json optimizers = Json::object();
  for (const Group& group : model.groups) {
    optimizers[group.optimizer] = keys->OptimizerKey(group.optimizer);
  }
  return {{"model", keys->model}, {"optimizers", std::move(optimizers)}};
}

}  // namespace

StepAnswers::Answer StepAnswers::Describe() {
  const StepModel& model = step_->model;
  Json groups = Json::array();
  for (const Group& group : model.groups) {
    Json names = Json::array();
    for (const ParameterIndex p : group.parameters) names.push_back(model.parameter(p).name);
    groups.push_back({{"optimizer", group.optimizer},
                      {"parameters", std::move(names)},
                      {"pickle", Hex(group.hyper_parameters)}});
  }
  Json documents = Json::array();
  for (const Document& document : model.documents) {
    Json tensors = Json::array();
    for (const StoredTensor& tensor : document.tensors) {
      tensors.push_back({{"dtype", TorchName(tensor.dtype)},
                         {"shape", tensor.shape},
                         {"strides", tensor.strides},
                         {"beside", tensor.atom.has_value()}});
    }
    documents.push_back({{"key", document.key},
                         {"scope", document.scope},
                         {"pickle", Hex(document.pickle)},
                         {"tensors", std::move(tensors)}});
  }
  Json numbers = Json::array();
  for (const Atom& atom : model.atoms) {
    if (!IsPythonNumber(atom.source)) continue;
    numbers.push_back({atom.optimizer, atom.kind, model.parameter(atom.parameter).name});
  }
  text_ = Json({{"id", step_->record.id},
                {"groups", std::move(groups)},
                {"documents", std::move(documents)},
                {"owners", FirstOwners(views_->shown())},
                {"spelling", SpellingOf(model)},
                {"numbers", std::move(numbers)}})
              .dump(-1, ' ', false, Json::error_handler_t::replace);
  return std::as_bytes(std::span<const char>(text_));
}

}  // namespace ckptfs
