"""The page of all captions of an evaluation: pictures, what the model says, what people say, scores."""
