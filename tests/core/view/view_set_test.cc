// SPDX-License-Identifier: Apache-2.0

#include "core/view/view_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "core/base/strings.h"

namespace ckptfs {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Some files, whose content is the name of their format; "Upper" is "upper" too.
class NamedView final : public View {
 public:
  NamedView(std::shared_ptr<const StepModel> step, std::string format, std::set<std::string> files)
      : View(std::move(step)), format_(std::move(format)), files_(std::move(files)) {}

  Result<std::vector<ViewEntry>> List(std::string_view directory) const override {
    std::map<std::string, ViewEntry> entries;
    const std::string prefix = directory.empty() ? "" : StrCat(directory, "/");
    for (const std::string& file : files_) {
      if (!file.starts_with(prefix)) continue;
      const std::string rest = file.substr(prefix.size());
      const size_t slash = rest.find('/');
      ViewEntry entry;
      entry.name = rest.substr(0, slash);
      entry.size = slash == std::string::npos ? format_.size() : 0;
      if (slash != std::string::npos) entry.type = ViewEntry::Type::kDirectory;
      entries.emplace(entry.name, entry);
    }
    if (entries.empty()) return Fail(ErrorCode::kNotFound, std::string(directory));
    std::vector<ViewEntry> list;
    for (auto& [name, entry] : entries) list.push_back(std::move(entry));
    return list;
  }
  Result<ViewEntry> Find(std::string_view path) const override {
    if (path == "broken") return Fail(ErrorCode::kDataLoss, "broken");
    if (path == "Upper") path = "upper";
    const size_t slash = path.rfind('/');
    const bool top = slash == std::string_view::npos;
    CKPT_ASSIGN_OR_RETURN(const auto entries, List(top ? "" : path.substr(0, slash)));
    for (const ViewEntry& entry : entries) {
      if (entry.name == path.substr(top ? 0 : slash + 1)) return entry;
    }
    return Fail(ErrorCode::kNotFound, std::string(path));
  }
  Result<Plan> MakePlan(std::string_view file) const override {
    PlanBuilder plan;
    plan.Literal(format_);
    if (file == "beyond") plan.BlobRange(BlobIndex{0}, 0, 1);  // the step has no blob
    return std::move(plan).Finish();
  }
  uint64_t MemoryBytes() const override { return 1000; }

 private:
  const std::string format_;
  const std::set<std::string> files_;
};

class NamedFormat final : public ViewFormat {
 public:
  NamedFormat(std::string name, std::set<std::string> files)
      : name_(std::move(name)), files_(std::move(files)) {}
  std::string_view name() const override { return name_; }
  Result<std::shared_ptr<const View>> Open(std::shared_ptr<const ShownState> shown) const override {
    if (files_.empty()) return Fail(ErrorCode::kUnsupported, StrCat(name_, " cannot"));
    return std::make_shared<const NamedView>(shown->shared_step(), name_, files_);
  }

 private:
  const std::string name_;
  const std::set<std::string> files_;
};

using Files = std::map<std::string, std::set<std::string>>;  // by format; none: it refuses

std::shared_ptr<const ViewSet> Open(const Files& files) {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  for (const auto& [name, shown] : files) {
    formats.push_back(std::make_unique<NamedFormat>(name, shown));
  }
  return ViewSet::Open(std::make_shared<const StepModel>(), Layout{}, formats);
}

std::vector<std::string> NamesIn(const ViewSet& views, std::string_view directory) {
  std::vector<std::string> names;
  const auto entries = views.List(directory);
  EXPECT_TRUE(entries) << entries.error().message;
  for (const ViewEntry& entry : *entries) names.push_back(entry.name);
  return names;
}

TEST(ViewSetTest, ANameAtTheTopBelongsToTheFirstFormatWithAllBelowIt) {
  const auto views = Open({{"a", {"shared/x", "mine"}}, {"longer", {"shared/y", "shared/x", "z"}}});
  EXPECT_THAT(NamesIn(*views, ""), ElementsAre("mine", "shared", "z"));
  EXPECT_THAT(NamesIn(*views, "shared"), ElementsAre("x"));
  EXPECT_EQ(views->Find("shared/x")->size, 1u);
  EXPECT_EQ(views->MakePlan("shared/x")->plan.size(), 1u);
  EXPECT_EQ(views->Find("shared/y").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(views->MakePlan("z")->plan.size(), 6u);
}

TEST(ViewSetTest, OffersWhatIsShownAndSaysEveryReasonWhyNot) {
  const auto views = Open({{"a", {}}, {"b", {"x"}}, {"c", {}}});
  EXPECT_TRUE(views->offer().Any());
  EXPECT_EQ(views->offer().answers[0].Text(), "no: a cannot");
  EXPECT_EQ(views->offer().answers[1].Text(), "yes");
  const Error reason = Open({{"a", {}}, {"c", {}}})->offer().Refusal();
  EXPECT_EQ(reason.code, ErrorCode::kUnsupported);
  EXPECT_THAT(reason.message, HasSubstr("no format can show layout"));
  EXPECT_THAT(reason.message, HasSubstr("; a: a cannot; c: c cannot"));
}

TEST(ViewSetTest, ANameThatIsAbsentMayBeThatOfAFormatThatRefuses) {
  const auto views = Open({{"a", {}}, {"b", {"x/y"}}});
  EXPECT_EQ(views->Find("other").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(views->WhyAbsent("other").code, ErrorCode::kUnsupported);
  EXPECT_THAT(views->WhyAbsent("other").message, HasSubstr("'other'; a: a cannot"));
  EXPECT_EQ(views->WhyAbsent("x/z").code, ErrorCode::kNotFound) << "x is b's";
}

TEST(ViewSetTest, NamesHaveOneSpellingAndErrorsAreNotAbsence) {
  const auto views = Open({{"a", {"upper"}}});
  EXPECT_TRUE(views->Find("upper"));
  EXPECT_EQ(views->Find("Upper").error().code, ErrorCode::kNotFound);
  EXPECT_EQ(views->Find("broken").error().code, ErrorCode::kDataLoss);
}

TEST(ViewSetTest, PlansAreChecked) {
  const auto views = Open({{"a", {"beyond", "good"}}});
  EXPECT_TRUE(views->MakePlan("good"));
  const auto plan = views->MakePlan("beyond");
  ASSERT_FALSE(plan);
  EXPECT_THAT(plan.error().message, HasSubstr("no such blob"));
}

TEST(ViewSetTest, WeighsItsViewsAndKeepsItsStepButTheOfferDoesNot) {
  std::vector<std::unique_ptr<ViewFormat>> formats;
  formats.push_back(std::make_unique<NamedFormat>("a", std::set<std::string>{"x"}));
  formats.push_back(std::make_unique<NamedFormat>("b", std::set<std::string>{"y"}));
  auto step = std::make_shared<const StepModel>();
  const std::weak_ptr<const StepModel> kept = step;
  auto views = ViewSet::Open(std::move(step), Layout{}, formats);
  EXPECT_GE(views->MemoryBytes(), 2000u);
  const auto offer = views->shared_offer();
  EXPECT_FALSE(kept.expired());
  views.reset();
  EXPECT_TRUE(kept.expired());
  EXPECT_EQ(offer->answers.size(), 2u);
}

TEST(ReadingTest, IsGuessedByTheNameOfASourceFile) {
  EXPECT_EQ(GuessReading("mp_rank_00_model_states.pt"), Reading::kCopied);
  EXPECT_EQ(GuessReading("model.safetensors"), Reading::kMapped);
  EXPECT_EQ(GuessReading("latest"), Reading::kRandom);
}

TEST(LayoutOffer, NamesACauseOnce) {
  const Error wide =
      Error{ErrorCode::kInvalid, "too wide"}.OfParameter("a.b").Needing("give --narrow");
  LayoutOffer offer;
  offer.name = "tp3";
  offer.answers = {{"huggingface", Error{ErrorCode::kUnsupported, "no config"}},
                   {"rank", wide},
                   {"deepspeed", wide},
                   {"other", {}}};
  ASSERT_EQ(offer.Causes().size(), 2u);
  EXPECT_EQ(offer.Causes()[1].Text(), "rank, deepspeed: 'a.b': too wide; give --narrow");
  EXPECT_EQ(offer.Causes()[1].error.layout, "tp3");
  const Error refusal = offer.Refusal();
  EXPECT_EQ(refusal.message,
            "no format can show layout tp3; huggingface: no config; "
            "rank, deepspeed: 'a.b': too wide; give --narrow");
  EXPECT_EQ(refusal.layout, "tp3");
  EXPECT_EQ(refusal.parameter, "a.b") << "that of the cause that most give";
  EXPECT_EQ(refusal.needs, "give --narrow");
}

TEST(ErrorTest, KeepsWhatAProgramMayActOnAsItRises) {
  const Error error = Error{ErrorCode::kInvalid, "reason"}
                          .OfParameter("inner")
                          .Needing("give --x")
                          .OfParameter("outer")
                          .WithContext("step 3");
  EXPECT_EQ(error.message, "step 3: 'outer': 'inner': reason; give --x");
  EXPECT_EQ(error.parameter, "inner");
  EXPECT_EQ(error.needs, "give --x");
}

TEST(ViewSetTest, OfAFormatThatIsNamedItsOwnReasonAloneIsTold) {
  const auto views = Open({{"deepspeed", {}}, {"rank", {}}, {"shown", {"dir/file"}}});
  for (const char* path : {"deepspeed", "deepspeed/latest"}) {
    const Error why = views->WhyAbsent(path);
    EXPECT_EQ(why.code, ErrorCode::kUnsupported);
    EXPECT_EQ(why.message,
              StrCat("layout ", Layout{}.ToString(), " has no deepspeed: deepspeed cannot"));
    EXPECT_EQ(why.layout, Layout{}.ToString());
  }
  EXPECT_THAT(views->WhyAbsent("rank7/model.pt").message, HasSubstr("has no rank7: rank cannot"));
}

TEST(ViewSetTest, WhatWasMeantIsTold) {
  const auto views =
      Open({{"deepspeed", {}}, {"rank", {"rank0/model.pt", "rank1/model.pt", "rank2/x"}}});
  const auto said = [&](std::string_view path) { return views->WhyAbsent(path).message; };
  EXPECT_THAT(said("deepspede/latest"), HasSubstr("do you mean deepspeed?"));
  EXPECT_THAT(said("rank0/modle.pt"), HasSubstr("do you mean model.pt?"));
  EXPECT_THAT(said("rank9/model.pt"), HasSubstr("there are rank0 to rank2"));
  EXPECT_EQ(views->WhyAbsent("deepspede").code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace ckptfs
